"""How the processes of a job find each other: store, names, secrets, wake-ups, the end."""
