"""Which tests `make test` leaves to `make test-all`, so that it takes minutes.

By rule, of a test with parameters (`sampled`): every value of every parameter stays in `make test`, not every
combination of them; and of tests that start processes and differ in their launcher, library or number of
ranks alone, one stays, another one for each test. By name (`LONG`): tests that take long and have a shorter
one of their kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath
from typing import Final
from zlib import crc32

import pytest
from hypothesis import settings

ALIKE: Final = ("via", "backend", "library", "ranks")
"""Parameters of jobs: tests of one function that differ in these alone test the same feature."""
WHOLE: Final = (
    # One job of ranks serves them all: leaving out some would save nothing.
    "test_clients.py::test_client_trains_as_on_gloo",
)
"""Tests of which every combination stays."""
_FAILING: Final = "test_launch.py::test_failing_rank_ends_the_job_and_is_shown"
LONG: Final = (
    # every ordering of streams; one of each module is in `make test`, and each codec on one of the libraries
    "test_races.py::test_every_ordering_that_is_left_out_is_found",
    "test_races.py::test_no_race_and_the_right_results[nccl, topk",
    "test_races.py::test_no_race_and_the_right_results[gloo, bf16",
    "test_races.py::test_no_race_and_the_right_results[gloo, fused, int8",
    "test_races.py::test_no_race_and_the_right_results[nccl, hierarchical, fused",
    "test_races.py::test_no_race_and_the_right_results[nccl, hierarchical, delta",
    "test_races.py::test_no_race_and_the_right_results[nccl, int8_block",
    "test_races.py::test_no_race_and_the_right_results[nccl, int_shared",
    "test_races.py::test_no_race_and_the_right_results[nccl, powersgd",
    "test_races.py::test_no_race_and_the_right_results[nccl, arrays, int8",
    "test_races.py::test_no_race_and_the_right_results[gloo, delta",
    "test_races.py::test_no_race_and_the_right_results[gloo, sign1",
    "test_races.py::test_no_race_and_the_right_results[gloo, hierarchical, int8",
    "test_interleavings.py::test_every_order_of_larger_programs",
    "test_interleavings.py::test_every_order[four-nccl, fused-2]",
    "test_interleavings.py::test_what_is_left_out_shows_nothing_new",  # thousands of runs
    "test_interleavings.py::test_many_orders_of_programs_that_have_too_many",
    *(f"test_interleavings.py::test_every_course_of_a_rank_of_two_nodes[{rank}" for rank in (1, 2, 3)),
    # deaths while a newcomer gets the state; one is in `make test`
    "test_newcomers.py::test_deaths_while_a_newcomer_gets_the_state[deaths1]",
    "test_newcomers.py::test_deaths_while_a_newcomer_gets_the_state[deaths2]",
    "test_newcomers.py::test_deaths_while_a_newcomer_gets_the_state[deaths3]",
    "test_newcomers.py::test_deaths_while_a_newcomer_gets_the_state[deaths4]",
    "test_newcomers.py::test_too_few_ranks_do_not_wait",
    # the compiler needs seconds for each; one module is in `make test`
    "test_kernels_compile.py::test_kernels_compile[cast",
    "test_kernels_compile.py::test_kernels_compile[delta",
    "test_kernels_compile.py::test_kernels_compile[digest",
    "test_kernels_compile.py::test_kernels_compile[fp8_block",
    "test_kernels_compile.py::test_kernels_compile[int2_block",
    "test_kernels_compile.py::test_kernels_compile[int4_block",
    "test_kernels_compile.py::test_kernels_compile[int_shared",
    "test_kernels_compile.py::test_kernels_compile[sign1",
    # compiles all kernels, where they have not been compiled yet
    "test_compiling.py::test_warmup_leaves_no_kernel_out",
    # `make test` has every shape on one rank and two, in modes and groups by turns, and every type on one.
    "test_conformance.py::test_conforms[three ranks",
    "test_conformance.py::test_conforms[two ranks, every type",
    "test_conformance.py::test_conforms[one rank, every shape",
    # the same calls on three ranks
    *(
        f"test_arguments.py::test_{each}[three ranks"
        for each in (
            "bad_arguments_are_refused_with_nothing_sent",
            "bad_arguments_are_refused_alike_on_every_rank",
            "init_and_finalize_in_the_wrong_order_are_refused",
        )
    ),
    # torch's own tests
    "test_torch_suite.py::test_torchs_own",
    # training runs of the examples, compared with torch or with one process on two ranks
    "test_dlrm.py::test_a_few_lines_compare_with_torch",
    "test_dlrm.py::test_two_processes_on_torch_train_the_same_model",
    "test_gpt.py::test_all_libraries_train_the_same_model",
    "test_gpt.py::test_ranks_together_are_the_model_of_one_process[3]",
    "test_gpt.py::test_ranks_refuse_together",
    "test_moe.py::test_ranks_train_as_one_process_with_all_experts[3]",
    "test_cosmo.py::test_ranks_together_are_one_process[4",
    "test_spatial.py::test_spread_layers_are_those_of_one_process[3]",
    "test_docs.py::test_the_figures_of_codecs_are_those_of_a_run",
    "test_docs.py::test_python_blocks_run_on_two_ranks",
    # benchmarks and tuning from end to end
    "test_benchmarks.py::test_operations_are_measured_beside_a_busy_process",
    "test_benchmarks.py::test_the_default_is_compared_with_torch_size_by_size",
    "test_tuning.py::test_tune_writes_a_table_and_resumes",
    "test_tuning.py::test_algorithm_files_are_compared_and_named_in_the_table",
    "test_tuning.py::test_every_kind_can_be_measured_and_ranks_agree[mpi-3]",
    "test_tuning.py::test_every_kind_can_be_measured_and_ranks_agree[torch-3]",
    # random programs and mismatches; shorter runs of both stay
    "test_fuzz.py::test_random_programs_give_the_oracles_results[2-1500-caller]",
    "test_fuzz.py::test_random_programs_give_the_oracles_results[3-800-caller]",
    "test_fuzz.py::test_random_programs_give_the_oracles_results[4-500-caller]",
    "test_fuzz.py::test_random_programs_give_the_oracles_results[2-400-thread]",
    "test_mismatch.py::test_every_mismatch_is_found_and_nothing_else[mpi-3",
    "test_mismatch.py::test_every_mismatch_is_found_and_nothing_else[torch-3",
    # interleavings of larger programs
    "test_deadlock_model.py::test_no_program_that_all_ranks_share_deadlocks[3-3",
    "test_deadlock_model.py::test_no_program_deadlocks[2-3",
    "test_deadlock_model.py::test_no_program_deadlocks[3-2-True-at_least3-steady]",
    "test_deadlock_model.py::test_no_sampled_program_deadlocks[TWO-5",
    "test_deadlock_model.py::test_no_sampled_program_deadlocks[THREE-4",
    "test_deadlock_model.py::test_no_sampled_program_deadlocks[CHAIN-5",
    *(
        f"test_deadlock_model.py::test_the_reduction_changes_no_verdict[{checked}-{rule}]"
        for checked in (False, True)
        for rule in ("one_order", "issue_never_blocks", "wait_progresses_all", "queues")
    ),
    # faults beyond one of a class
    "test_faults.py::test_survivors_report_the_missing_ranks[never calls-1-torch]",
    "test_faults.py::test_survivors_report_the_missing_ranks[SIGKILL-1-ulfm]",
    "test_faults.py::test_survivors_report_the_missing_ranks[SIGSTOP-1-ulfm]",
    "test_faults.py::test_survivors_report_the_missing_ranks[exits-1-ulfm]",
    "test_faults.py::test_survivors_report_the_missing_ranks[raises-1-torch]",
    "test_faults.py::test_survivors_report_the_missing_ranks[SIGKILL-0",
    "test_faults.py::test_survivors_report_the_missing_ranks[SIGSTOP-0",
    "test_faults.py::test_job_with_pending_operations_exits_cleanly[mpi-no finalize",
    "test_faults.py::test_job_with_pending_operations_exits_cleanly[torch-",
    "test_faults.py::test_kill_9_in_the_middle_leaves_nothing[torch]",
    "test_faults.py::test_survivors_report_missing_ranks_beside_a_progress_thread[never calls]",
    "test_waiting.py::test_sleeping_ranks_detect_dead_and_stopped_peers[stops",
    *(
        f"test_losing.py::test_two_hosts_cut_off_from_each_other[{each}"
        for each in ("poll", "backward", "blocking")
    ),
    "test_losing.py::test_three_hosts_of_which_one_is_cut_off",
    "test_losing.py::test_three_hosts_a_death",
    "test_losing.py::test_an_agent_that_is_lost_is_replaced_and_no_rank_with_it[supervising]",
    "test_losing.py::test_an_agent_that_is_lost_is_replaced_and_no_rank_with_it[stopped]",
    "test_losing.py::test_stopped_ranks_are_waited_for_if_the_configuration_says_so[wait]",
    # of losses that a job survives, one rank, one host and one of mpirun stay; of elastic loops, one
    "test_surviving.py::test_a_whole_host_of_three[cut-2]",
    "test_surviving.py::test_a_host_that_tears_connections_is_not_waited_for_until_the_usual_limit",
    "test_surviving.py::test_one_host_after_another",
    "test_surviving.py::test_a_training_loop_on_two_hosts_goes_on",
    "test_elastic.py::test_a_step_that_the_optimizer_has_made_is_not_repeated",
    "test_elastic.py::test_the_job_goes_on_with_fewer_ranks_when_no_restarts_are_left",
    "test_losing.py::test_an_agent_that_is_lost_is_replaced_and_no_rank_with_it[working]",
    "test_losing.py::test_a_rank_that_computes_for_long_is_not_lost",
    "test_losing.py::test_stopped_ranks_are_waited_for_if_the_configuration_says_so[30s]",
    "test_reconfigure.py::test_nothing_is_left_of_many_reconfigurations",
    # the launcher: failures and ends by the other launcher too
    "test_launch.py::test_signal_ends_all_ranks[SIGINT-torch]",
    "test_launch.py::test_signal_ends_all_ranks[SIGTERM-mpi]",
    f"{_FAILING}[exit-exited with status 7, without a word-None-torch]",
    f"{_FAILING}[kill-was killed by SIGKILL, without a word-None-torch]",
    f"{_FAILING}[raise-exited with status 1:-ValueError: the reason it failed-torch]",
    "test_launch.py::test_the_dump_of_a_fault_is_shown_once[torch]",
    "test_launch.py::test_one_mistake_of_all_ranks_is_one_message[torch]",
    "test_launch.py::test_kill_9_of_a_rank_from_outside[mpi]",
    "test_launch.py::test_kill_9_of_the_launcher_ends_ranks_and_the_next_start_cleans_up[torch]",
    "test_launch.py::test_folders_of_a_job_are_for_their_owner_only[torch]",
    "test_launch.py::test_two_jobs_at_once_do_not_touch_each_other[torch]",
    "test_launch.py::test_closed_output_pipe_ends_the_job[torch]",
    "test_launch.py::test_closed_output_and_error_pipes_end_the_job[mpi]",
    "test_launch.py::test_mpich[exit]",
    "test_launch.py::test_mpich[kill]",
    "test_launch.py::test_a_library_that_only_carries_an_address_ends_well",
    "test_launch.py::test_tasks_of_a_slurm_step_find_each_other",
    "test_launch.py::test_too_little_shared_memory_is_reported_under_mpiexec",
    "test_launch_restarts.py::test_variables_of_ranks",
    "test_launch_restarts.py::test_a_rank_that_fails_at_once_is_not_started_again_and_again_at_once",
    "test_launch_restarts.py::test_a_rank_that_ended_with_0_is_not_started_again_and_counts",
    "test_launch_restarts.py::test_the_exception_of_a_rank_that_is_started_again_is_one_line",
    "test_launch_restarts.py::test_the_summary_is_of_the_last_process",
    "test_launch_restarts.py::test_whole_tracebacks_on_request",
    # the board of a running job, written to by a stranger: one of each entry stays
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[row-gloo]",
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[closed",
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[failed-gloo]",
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[compiling-mpi]",
    # many rounds
    "test_reset.py::test_a_job_continues_after_failures_and_resets[3-",
    "test_reset.py::test_failed_reset_names_the_remedy[torch]",
    "test_reset.py::test_groups_opened_after_an_mpi_failure_use_other_libraries[3-",
    "test_reset.py::test_groups_opened_after_an_mpi_failure_use_other_libraries[4-",
    "test_groups.py::test_messages_of_one_thread_beside_collectives_of_another[torch-gloo]",
    "test_clients.py::test_client_trains_as_on_gloo[ddp-plain-gloo]",
    "test_clients.py::test_client_trains_as_on_gloo[ddp-unused-gloo]",
    "test_clients.py::test_a_backward_pass_that_fails_raises[dynamic]",
    # more ranks than cores
    "test_hierarchical.py::test_results[2 x 3]",
    "test_hierarchical.py::test_results[3 x 2, always compared]",
    "test_hierarchical.py::test_results[nodes in no order]",
    "test_hierarchical.py::test_results[shared memory, gloo, every type]",
    "test_compressed.py::test_every_codec_on_every_operation[4",
    "test_compressed.py::test_every_codec_on_every_operation[2-backends1-False]",
    "test_compressed.py::test_every_codec_on_every_operation[3",
    "test_wrap.py::test_training_matches_ddp_on_three_ranks",
    "test_wrap.py::test_training_matches_ddp[gloo]",
    "test_planning.py::test_auto_plan_keeps_the_plan_with_faster_measured_steps[searched-by size-codecs]",
    "test_planning.py::test_auto_plan_keeps_the_plan_with_faster_measured_steps[by size-searched-exact]",
    "test_gradients.py::test_training_with_codecs[ddp]",
    # both formats and both scales of fp8 stay
    "test_kernels_fp8_block.py::test_the_triton_kernels_are_the_reference[float32-e5m2]",
    "test_kernels_fp8_block.py::test_the_triton_kernels_are_the_reference[e8m0-e4m3]",
    # layouts
    "test_layout_autograd.py::test_gradients_are_those_of_one_process[all",
    # samples of all pairs stay, and of numbers of ranks and libraries some of each
    "test_layouts.py::test_all_pairs_on_a_mesh",
    "test_layouts.py::test_every_mutant_of_a_plan_is_found[12]",
    "test_layouts.py::test_every_mutant_of_a_plan_is_found[3x2]",
    "test_layouts.py::test_every_mutant_of_a_plan_is_found[4x",
    "test_layouts.py::test_every_mutant_of_a_plan_is_found[2x2x2]",
    "test_layouts.py::test_all_numbers_of_ranks_to_others",
    *(
        f"test_redistribute.py::test_{name}[{each}"
        for name, some in {
            "any_layout_to_any_other": "2- 3-msccl 3-mpi 4 6",
            "plans_are_kept_and_calls_may_be_in_flight_together": "2-msccl 2-mpi 3-gloo 3-mpi",
            "by_messages_between_pairs_of_ranks": "everything-mpi everything-msccl states-mpi states-gloo",
            "later_calls_do_not_wait_for_ranks_that_are_late": "gloo",
            "a_state_of_many_tensors_in_one_round_and_in_many": "2-msccl 2-gloo 3-gloo 3-mpi 4",
            "a_codec_leaves_replicas_with_the_same_bits": "2-mpi 2-msccl 4",
            "bad_calls_are_refused_on_all_ranks_alike": "2-msccl 2-gloo 3-gloo 3-mpi",
        }.items()
        for each in some.split()
    ),
    # compiled models: one kind and one trial stay
    "test_compiled_models.py::test_every_kind_of_model",
    "test_compiled_models.py::test_inductor_compiles_parts",
    "test_compiled_models.py::test_gradients_of_a_model_compiled_in_parts_are_averaged",
    "test_compiled_models.py::test_cuts_are_chosen_in_the_job_alike_on_all_ranks",
    "test_compiled_models.py::test_the_faster_cuts_stay_alike_on_all_ranks[blocks",
    # a compiler that is waited for
    "test_compiling.py::test_deadlines_exclude_the_compilation_of_a_peer",
    # long runs; no mutation of `mutate.py` is found by one of these alone
    "test_benchmarks.py::test_every_codec_has_figures",
    "test_clients.py::test_client_trains_as_on_gloo[ddp-plain-mcr]",
    "test_cosmo.py::test_two_ranks_beat_the_mean_prediction",
    "test_faults.py::test_survivors_report_the_missing_ranks[never calls-1-ulfm]",
    "test_faults.py::test_launcher_names_the_rank_that_left_first",
    "test_faults.py::test_wait_can_be_repeated_after_its_timeout",
    "test_feedback.py::test_residuals_survive_a_restart_with_fewer_ranks[False]",
    "test_fuse.py::test_lookup_of_a_peers_buckets_binds_nothing[bf16]",
    "test_gpt.py::test_two_ranks_train_and_report[tensor]",
    "test_gradients.py::test_gaps_between_gradients_do_not_change_results",
    "test_hierarchical.py::test_on_four_ranks",
    "test_hierarchical.py::test_parameters_and_gradients_of_fsdp",
    "test_hierarchical.py::test_two_hosts_of_two_ranks",
    "test_launch.py::test_kill_9_of_a_rank_from_outside[torch]",
    "test_launch.py::test_the_cause_is_shown_before_its_consequences",
    "test_launch.py::test_the_store_of_torch_is_on_loopback",
    "test_launch.py::test_whole_tracebacks_on_request",
    "test_mpi_contexts.py::test_communicators_are_bounded_in_a_process",
    "test_online.py::test_every_group_has_its_own_trials_and_rank_0_writes_those_of_its_own",
    "test_online.py::test_persistent_operations_are_tuned_or_keep_the_final_choice",
    "test_reset.py::test_reset_after_an_mpi_failure_keeps_the_contexts_of_signatures",
    "test_reset.py::test_groups_opened_after_an_mpi_failure_use_other_libraries[2-broken_on1",
    "test_reset.py::test_reset_frees_mpi_communicators",
    "test_seams.py::test_job_ends_well_when_one_rank_finishes_seconds_later",
    "test_serve.py::test_servers_have_the_weights_of_the_trainers[4",
    "test_shm_interpreter.py::test_killed_ranks_leave_nothing_behind",
    "test_signing.py::test_operations_that_need_the_store_fail_soon_after_its_owner_dies",
    "test_signing.py::test_forged_objects_are_refused_in_horovod_programs",
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[failed-mpi]",
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group[row-mpi]",
    "test_signing.py::test_jobs_of_torchrun_on_one_host_are_signed",
    "test_spatial.py::test_spread_layers_are_those_of_one_process[4]",
    "test_startup.py::test_kernels_from_the_cache_need_none_of_the_compiler",
    "test_store_keys.py::test_groups_that_are_closed_leave_no_keys",
    "test_torch_backend.py::test_a_job_that_torchrun_restarts",
    "test_tuning.py::test_bench_prints_rows_of_the_contract",
    "test_tuning.py::test_inside_a_job_of_mpirun_the_command_is_a_rank",
    "test_tuning.py::test_measurements_of_another_machine_are_refused_in_one_line",
    "test_wrap.py::test_the_step_after_a_backward_pass_that_raised[ranks2]",
    # the tables that "two ranks" has by the other launcher
    "test_conformance.py::test_conforms[two ranks without mpi",
    # of losses on one host those of test_faults.py stay; of those on more hosts, a cut, and a host's death
    "test_losing.py::test_one_host",
    "test_losing.py::test_two_hosts[",
    "test_losing.py::test_a_cut_link_is_found_by_connections_that_acknowledge_nothing",
    "test_surviving.py::test_half_of_the_hosts",
    "test_surviving.py::test_a_host_that_is_cut_off_while_the_others_make_the_next_world",
    "test_faults.py::test_kill_9_in_the_middle_leaves_nothing[mpi]",
    "test_local.py::test_a_rank_that_is_killed_costs_at_most_a_round[2-9-3-None]",
    "test_local.py::test_a_rank_that_is_killed_costs_at_most_a_round[0-6-3-None]",
    "test_shrink.py::test_survivors_go_on[gloo-3]",
    "test_shrink.py::test_survivors_go_on[shared memory-3]",
    "test_shrink.py::test_a_second_death_meanwhile[decided]",
    "test_surviving.py::test_a_rank_of_two_hosts",
    # resets beside lost ranks on one host are in test_arrivals.py
    "test_surviving.py::test_a_reset_beside_a_host_that_is_lost_names_it",
    "test_arrivals.py::test_a_rank_that_is_started_again_before_init_is_waited_for",
    "test_fsdp_state.py::test_shards_of_lost_ranks_come_from_their_replicas[victims1",
    "test_fsdp_state.py::test_shards_of_lost_ranks_come_from_their_replicas[victims2",
    "test_shm_p2p.py::test_polls_of_survivors_return_false_after_a_kill",
    "test_sync.py::test_a_death_is_reported_to_those_whom_it_concerns[2-1]",
    "test_sync.py::test_damage_is_noticed_and_concerns_nobody_else",
    "test_faults.py::test_messages_of_ranks_that_have_left",
    "test_fsdp_state.py::test_shards_without_replicas_are_lost_and_a_model_can_be_sharded_again",
    "test_reconfigure.py::test_a_process_that_dies[come]",
    "test_reconfigure.py::test_a_process_that_dies[made]",
    "test_reconfigure.py::test_a_process_that_is_left_out_is_told_and_may_come_back[1]",
    "test_reconfigure.py::test_a_process_that_is_left_out_is_told_and_may_come_back[2]",
    "test_inheritance.py::test_a_loss_while_it_is_taken_over[taken]",
    "test_mismatch.py::test_every_mismatch_is_found_and_nothing_else[mpi-2-every-1]",
    # of the launcher's work, a start again and an end in each way stay
    "test_launch_restarts.py::test_a_signal_ends_all_ranks",
    "test_launch_restarts.py::test_kill_9_of_the_launcher_ends_ranks_and_leaves_nothing",
    "test_launch_restarts.py::test_the_others_are_not_disturbed",
    "test_launch_restarts.py::test_too_few_ranks_end_the_job",
    "test_launch_restarts.py::test_kill_9_of_the_supervisor_ends_ranks_and_leaves_nothing",
    "test_launch.py::test_two_jobs_at_once_do_not_touch_each_other[mpi]",
    "test_launch.py::test_one_mistake_of_all_ranks_is_one_message[mpi]",
    "test_launch.py::test_closed_output_and_error_pipes_end_the_job[torch]",
    "test_cli.py::test_bad_options_about_failed_ranks[--min-ranks 1 --config",
    "test_compiling.py::test_two_threads_that_compile_the_same_kernel",
    "test_compiling.py::test_no_compiler_where_no_kernel_is_used",
    "test_reconfigure.py::test_ranks_are_in_the_order_of_the_handles[store of rank 0]",
    "test_replay.py::test_under_a_launcher_every_process_is_a_rank",
    "test_replay.py::test_messages_go_from_one_rank_to_the_other_in_every_copy",
    "test_torch_backend.py::test_autoload_does_not_change_programs_on_other_backends",
    "test_torch_backend.py::test_under_the_name_of_gloo",
    "test_torch_backend.py::test_a_wrong_masquerade_is_refused",
    # Ray and Slurm where they are installed, by `make test-launchers`; of Slurm the three shortest stay
    "test_ray.py::",
    "test_slurm.py::test_tasks_of_a_step_are_ranks[by_torch]",
    "test_slurm.py::test_mpi_under_srun[pmi2]",
    "test_slurm.py::test_torchruns_as_tasks",
    "test_slurm.py::test_steps_of_a_batch_job_do_not_meet",
    "test_slurm.py::test_a_task_that_dies_is_named",
    "test_slurm.py::test_nodes_are_hosts",
    # many rounds, or trainings of which shorter ones stay
    "test_feedback.py::test_error_feedback_recovers_the_compression_error[3-SUM]",
    "test_leaks.py::test_dropped_groups_and_models",
    "test_leaks.py::test_jobs_that_have_ended",
    "test_moe.py::test_all_libraries_train_the_same_experts",
    "test_moe.py::test_ranks_refuse_together",
    "test_gpt.py::test_outer_steps_beside_ways_that_average_gradients",
    "test_gpt.py::test_ways_of_outer_steps_that_are_not_known",
    "test_gradients.py::test_feedback_and_exemptions_keep_the_loss_of_uncompressed_training",
    "test_planning.py::test_auto_plan_keeps_the_plan_with_faster_measured_steps[searched-by size-exact]",
    "test_redistribute.py::test_by_messages_between_pairs_of_ranks[everything-gloo]",
    # some pairs of placements stay, of every two meshes and by plans of ours and of DTensor
    "test_dtensor.py::test_redistribution_between_meshes_and_within_planned[every pair]",
    "test_dtensor.py::test_redistribution_of_small_tensors_within_planned",
    "test_failover.py::test_a_training_step_does_not_notice[int8_block]",
    # two hosts of a rank each stay
    "test_late_ranks_on_hosts.py::test_the_rank_that_sleeps_in_its_backward_pass_is_named_on_all_hosts[2-",
    # two ranks with all libraries stay
    "test_spatial.py::test_halos_over_gloo",
    # 2, 3 and 5 of the simulated ranks stay
    "test_dlrm.py::test_any_number_of_ranks_trains_the_same_model[27]",
    # of deltas one library on two ranks and one on three stay, and two ranks of what is bounded
    "test_delta.py::test_every_kind_brings_all_bits[gloo",
    "test_delta.py::test_what_is_kept_is_bounded_and_what_is_dropped_comes_whole[3]",
    # ranks of one process, and two or more with MPI, stay
    "test_expert.py::test_without_mpi",
    # a plan that is loaded before the model is wrapped; one that is loaded later stays
    "test_given_plan.py::test_loaded_state_restores_the_plan_without_a_trial[False]",
    # a receiver's death and that of one source stay
    "test_sync_layouts.py::test_a_death_is_reported_by_rank[0]",
    # a history at the sources stays
    "test_sync_layouts.py::test_three_sources_and_two_receivers_at_their_own_pace[0.0]",
    # a graph that is captured at the first pass stays
    "test_compiled_models.py::test_a_capture_leaves_the_graph_whole[later]",
    # test_launch.py::test_kill_9_of_the_launcher_ends_ranks_and_the_next_start_cleans_up stays
    "test_launch_restarts.py::test_kill_9_of_all_processes_and_a_start_with_another_temporary_directory",
    # flipped bits on three ranks; those on two stay
    "test_verify.py::test_every_flipped_bit_is_found_on_all_ranks_alike[3",
    "test_capture.py::test_capture_records_whether_the_caller_polls_a_library",
    "test_given_plan.py::test_a_plan_for_more_ranks_is_refused_on_one",
    "test_horovod.py::test_ranks_that_have_not_started_an_operation_are_named",
    "test_local.py::test_a_newcomer_begins_with_the_outer_state",
    "test_moe.py::test_two_ranks_train_and_report",
    "test_trials.py::test_groups_that_share_ranks_agree_on_whose_trial_runs",
    "test_sync.py::test_every_version_arrives_bit_for_bit[mpi]",
    "test_sync.py::test_every_version_arrives_bit_for_bit[shared memory]",
    "test_sync.py::test_a_receiver_that_is_late_or_idle_costs_the_source_nothing",
    "test_trials.py::test_a_model_that_is_not_trained_any_more_delays_others_only_for_a_time",
    "test_wrap.py::test_hook_and_optimizer_train_like_wrap",
    "test_online.py::test_ranks_that_measure_different_things_agree_at_every_call[3-",
    "test_leaks.py::test_signatures_are_bounded",
    "test_compiled_models.py::test_gradients_missing_from_a_capture_are_averaged[on rank 1",
    # without jobs: the ends of a range, or one size or dtype, stay
    "test_benchmarks.py::test_curves_are_smoothed_and_drawn",
    "test_compiled_models.py::test_parts_are_compiled_by_themselves_and_evaluation_is_not_cut",
    "test_dlrm.py::test_a_library_that_adds_wrongly_is_found",
    "test_explain.py::test_built_in_tables_give_a_reason_where_their_figures_favour_another_choice[openmpi",
    "test_kernels_delta.py::test_the_triton_kernels_are_the_reference[torch.uint8]",
    "test_kernels_delta.py::test_the_triton_kernels_are_the_reference[torch.int64]",
    "test_kernels_int4_block.py::test_the_triton_kernels_are_the_reference[False]",
    "test_kernels_topk.py::test_exact_where_a_sample_decides_and_where_it_misleads[0.0",
    "test_kernels_topk.py::test_the_cpu_kernels_are_the_reference[0.01]",
    "test_kernels_topk.py::test_the_cpu_kernels_are_the_reference[0.3]",
    "test_layouts.py::test_some_meshes_to_others[2x2x2]",
    "test_local_steps.py::test_diloco[3]",
    "test_local_steps.py::test_diloco[4]",
    "test_kernels_topk_chunks.py::test_the_cpu_kernels_are_the_reference[32]",
    "test_local_steps.py::test_checkpoints_at_every_step_restore_the_same_run",
    "test_moe.py::test_the_large_shape_builds_without_memory",
    "test_msccl_verifier.py::test_counts_of_refused_and_harmless_mutants",
    "test_msccl_verifier.py::test_mutants_are_refused_or_harmless[all_reduce_hierarchical]",
    "test_msccl_verifier.py::test_mutants_are_refused_or_harmless[all_to_all_two_level]",
    # a smaller one, or one of another launcher, stays
    "test_local.py::test_a_rank_that_is_started_again_joins_an_elastic_loop",
    "test_local.py::test_every_codec_leaves_replicas_with_the_same_bits[3]",
    "test_fuse.py::test_all_kinds_fused_in_flight_give_correct_results[3-mpi]",
    "test_horovod.py::test_three_ranks",
    "test_msccl_backend.py::test_every_algorithm_by_name[4]",
    "test_shm_interpreter.py::test_results[4]",
    "test_torch_backend.py::test_the_backend_is_registered_with_torch[False]",
    "test_tuning.py::test_every_kind_can_be_measured_and_ranks_agree[torch-2]",
)
STALE: Final = pytest.StashKey[list[str]]()
"""Those of `LONG` that name no test, of the files that were collected."""


def sampled(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of the tests of one function those that stay in `make test`: see the text of this module.

    The choice depends on nothing but names and the order of parameters, so all workers make the same one.
    """
    name = _name(tests[0])
    tests = [each for each in tests if not is_long(each.location[0], each.name)]
    if name in WHOLE:
        return list(tests)
    if any(each.get_closest_marker("jobs") for each in tests):
        tests = _one_of_each(tests, crc32(name.encode()))
    return _covering(tests)


def _name(test: pytest.Function) -> str:
    return f"{PurePath(test.location[0]).name}::{test.originalname}"


def _one_of_each(tests: Sequence[pytest.Function], turn: int) -> list[pytest.Function]:
    """One of those that differ in `ALIKE` alone; those that are skipped here anyway all stay."""
    groups: defaultdict[Hashable, list[pytest.Function]] = defaultdict(list)
    for each in tests:
        skipped = any(mark.args and mark.args[0] for mark in each.iter_markers("skipif"))
        rest = {key: repr(value) for key, value in _params(each).items() if key not in ALIKE}
        groups[each.name if skipped else tuple(rest.items())].append(each)
    return [group[(turn + at) % len(group)] for at, group in enumerate(groups.values())]


def _covering(tests: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Few tests that together have every value of every parameter: always the one with most new ones next."""
    values = {each: _values(each) for each in tests}
    missing = set().union(*values.values())
    chosen = [each for each in tests if not values[each]]
    while missing:
        chosen.append(max(tests, key=lambda each: len(values[each] & missing)))
        missing -= values[chosen[-1]]
    return chosen


def _values(test: pytest.Function) -> set[Hashable]:
    """What a test takes of each `parametrize`; all combinations of one share its objects."""
    left = dict(_params(test))
    values: set[Hashable] = set()
    for mark in test.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        values.add(tuple((name, id(left.pop(name, None))) for name in names))
    return values.union((name, id(value)) for name, value in left.items())


def _params(test: pytest.Function) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def examples(count: int) -> int:
    """Of so many examples in `make test-all` those in this run."""
    return count * settings().max_examples // 100


def is_long(path: str, name: str) -> bool:
    """Whether the test of this name in this file is one of `LONG`."""
    return f"{PurePath(path).name}::{name}".startswith(LONG)


def stale(tests: Iterable[tuple[str, str]]) -> list[str]:
    """Those of `LONG` that name none of these tests, (file, name), of files that are among theirs."""
    names = [f"{PurePath(path).name}::{name}" for path, name in tests]
    files = {name.partition("::")[0] for name in names}
    return [
        each
        for each in LONG
        if each.partition("::")[0] in files and not any(name.startswith(each) for name in names)
    ]
