"""Stage `select`: chooses the library that runs an operation."""
