"""The long tests, by name: what `make test` leaves to `make test-all`; see `tiers.py`.

Of every library, launcher, layer, codec and kind of fault some tests stay, which need less of a processor.
"""

from __future__ import annotations

from typing import Final

FUNCTIONS: Final[dict[str, str]] = {
    "test_advise.py": """
        the_command_writes_a_pipeline_a_report_and_json bad_usage_is_a_line
    """,
    "test_agreement.py": "no_false_alarm_with_many_ranks_that_count_votes",
    "test_arrivals.py": """
        a_rank_that_is_started_again_before_init_is_waited_for the_supervisor_says_that_a_rank_does_not_come
    """,
    "test_arrivals_on_hosts.py": """
        a_rank_that_holds_the_interpreters_lock_in_init_is_not_lost
        a_host_that_is_cut_off_in_init_is_named_and_names_the_others
    """,
    "test_benchmarks.py": """
        operations_are_measured_beside_a_busy_process the_default_is_compared_with_torch_size_by_size
        every_codec_has_figures curves_are_smoothed_and_drawn
    """,
    "test_capture.py": """
        capture_records_whether_the_caller_polls_a_library
        a_capture_that_ends_apart_leaves_the_trial_alike_on_all_ranks
    """,
    "test_cli.py": "run_gives_the_configuration_to_the_ranks",
    "test_compiled_models.py": """
        every_kind_of_model_has_its_own_gradients inductor_compiles_parts
        gradients_of_a_model_compiled_in_parts_are_averaged cuts_are_chosen_in_the_job_alike_on_all_ranks
        parts_are_compiled_by_themselves_and_evaluation_is_not_cut a_capture_leaves_the_graph_whole
        gradients_missing_from_a_capture_are_averaged
    """,
    "test_compiling.py": """
        warmup_leaves_no_kernel_out deadlines_exclude_the_compilation_of_a_peer
        two_threads_that_compile_the_same_kernel no_compiler_where_no_kernel_is_used
        a_kernel_is_compiled_again_when_what_it_is_made_of_has_changed
        without_a_terminal_only_the_compiling_process_logs
    """,
    "test_config.py": "a_configuration_without_a_codec_imports_none",
    "test_cosmo.py": "two_ranks_beat_the_mean_prediction",
    "test_deadlock_model.py": """
        no_program_that_all_ranks_share_deadlocks no_sampled_program_deadlocks
    """,
    "test_delta.py": """
        between_nodes_a_payload_is_encoded_once_and_forwarded a_rank_may_drop_what_it_holds_by_itself
    """,
    "test_dlrm.py": """
        a_few_lines_compare_with_torch two_processes_on_torch_train_the_same_model
        a_library_that_adds_wrongly_is_found comparison_of_equals training_reduces_the_loss
    """,
    "test_docs.py": """
        the_figures_of_codecs_are_those_of_a_run python_blocks_run_on_two_ranks
    """,
    "test_dtensor.py": "redistribution_of_small_tensors_within_planned",
    "test_dumps.py": "faults_are_explained",
    "test_elastic.py": """
        a_step_that_the_optimizer_has_made_is_not_repeated
        the_job_goes_on_with_fewer_ranks_when_no_restarts_are_left
        a_rank_that_dies_before_the_loop_begins_makes_all_begin_anew
    """,
    "test_expert.py": "without_mpi",
    "test_failover.py": "a_training_step_does_not_notice",
    "test_faults.py": """
        launcher_names_the_rank_that_left_first wait_can_be_repeated_after_its_timeout
        messages_of_ranks_that_have_left kill_9_in_the_middle_leaves_nothing
        survivors_report_missing_ranks_beside_a_progress_thread job_with_pending_operations_exits_cleanly
    """,
    "test_feedback.py": """
        residuals_survive_a_restart_with_fewer_ranks concurrent_calls_give_the_results_of_sequential_ones
        state_belongs_to_tag_codec_and_options non_finite_values_reach_all_ranks_and_leave_no_residual
        ef21_resets_after_non_finite_values
    """,
    "test_fsdp_state.py": "shards_without_replicas_are_lost_and_a_model_can_be_sharded_again",
    "test_foreign_files.py": "more_damaged_files",
    "test_fuse.py": "lookup_of_a_peers_buckets_binds_nothing",
    "test_given_plan.py": """
        a_plan_for_more_ranks_is_refused_on_one loaded_state_restores_the_plan_without_a_trial
        a_plan_of_other_nodes_is_planned_anew a_plan_of_something_else_is_refused_on_all_ranks
    """,
    "test_gloo_swaps.py": """
        all_in_flight_are_told_of_the_death_of_the_other_side
        those_in_flight_wait_for_a_late_rank_with_one_thread
    """,
    "test_gpt.py": """
        all_libraries_train_the_same_model ranks_refuse_together
        outer_steps_beside_ways_that_average_gradients ways_of_outer_steps_that_are_not_known
    """,
    "test_gradients.py": """
        gaps_between_gradients_do_not_change_results
        feedback_and_exemptions_keep_the_loss_of_uncompressed_training training_with_codecs
        error_feedback_sends_the_residuals_of_gradients_later
    """,
    "test_groups.py": "polling_without_wait_reports_a_missing_peer",
    "test_heartbeat.py": """
        an_agent_that_is_replaced_goes_on both_sides_of_a_partition_name_the_ranks_beyond
    """,
    "test_hierarchical.py": """
        on_four_ranks parameters_and_gradients_of_fsdp two_hosts_of_two_ranks
    """,
    "test_horovod.py": """
        ranks_that_have_not_started_an_operation_are_named three_ranks
        fused_operations_complete_when_the_program_exits_without_shutdown
    """,
    "test_inheritance.py": """
        models_follow_their_groups_and_one_that_is_dropped_somewhere_holds_nobody_up
        groups_and_models_of_worlds_that_are_merged persistent_operations_are_bound_again
        residuals_of_a_group_are_kept
        a_state_is_not_encoded_with_loss_between_nodes_because_a_rule_is_without
    """,
    "test_interchange.py": """
        open_mpi_runs_each_algorithm_of_an_exported_file
        expressible_rules_survive_a_round_trip open_mpi_follows_an_exported_file
        open_mpi_follows_a_file_of_version_2_and_of_several_communicator_sizes
    """,
    "test_interleavings.py": """
        every_order_of_larger_programs what_is_left_out_shows_nothing_new
        many_orders_of_programs_that_have_too_many every_course_of_a_rank_of_two_nodes
        courses_of_one_rank_do_not_depend_on_what_others_are_told
    """,
    "test_kernels_delta.py": "the_codec_uses_the_kernels_for_gpus",
    "test_kernels_topk.py": "more_than_two_billion_values",
    "test_late_ranks.py": "a_rank_that_is_late_all_the_time_is_logged_by_one_other",
    "test_launch.py": """
        a_library_that_only_carries_an_address_ends_well tasks_of_a_slurm_step_find_each_other
        too_little_shared_memory_is_reported_under_mpiexec the_cause_is_shown_before_its_consequences
        the_store_of_torch_is_on_loopback whole_tracebacks_on_request
        one_mistake_of_all_ranks_is_one_message kill_9_of_a_rank_from_outside
        a_program_stays_itself_after_its_last_line
        two_jobs_at_once_do_not_touch_each_other closed_output_and_error_pipes_end_the_job
    """,
    "test_launch_restarts.py": """
        variables_of_ranks a_rank_that_fails_at_once_is_not_started_again_and_again_at_once
        a_rank_that_ended_with_0_is_not_started_again_and_counts
        the_exception_of_a_rank_that_is_started_again_is_one_line the_summary_is_of_the_last_process
        whole_tracebacks_on_request a_signal_ends_all_ranks
        kill_9_of_the_launcher_ends_ranks_and_leaves_nothing the_others_are_not_disturbed
        too_few_ranks_end_the_job kill_9_of_the_supervisor_ends_ranks_and_leaves_nothing
        kill_9_of_all_processes_and_a_start_with_another_temporary_directory
    """,
    "test_layouts.py": """
        all_pairs_on_a_mesh all_pairs_on_a_mesh_of_three_dimensions all_numbers_of_ranks_to_others
        some_meshes_to_others
    """,
    "test_leaks.py": """
        dropped_groups_and_models jobs_that_have_ended signatures_are_bounded
    """,
    "test_local.py": """
        a_newcomer_begins_with_the_outer_state a_rank_that_is_started_again_joins_an_elastic_loop
        what_becomes_of_residuals the_last_of_training_is_sent_by_the_codec_or_exactly
        every_codec_leaves_replicas_with_the_same_bits checkpoints_at_every_step_restore_the_same_run
        a_rule_compresses_between_nodes_alone
    """,
    "test_local_refusals.py": "a_scaler_makes_the_inner_step_and_its_skipped_steps_count",
    "test_local_steps.py": "checkpoints_at_every_step_restore_the_same_run",
    "test_losing.py": """
        three_hosts_of_which_one_is_cut_off three_hosts_a_death_names_one_rank_everywhere
        a_rank_that_computes_for_long_is_not_lost one_host
        a_cut_link_is_found_by_connections_that_acknowledge_nothing two_hosts
        an_agent_that_is_lost_is_replaced_and_no_rank_with_it
        stopped_ranks_are_waited_for_if_the_configuration_says_so
    """,
    "test_membership_model.py": "one_store_keeps_ranks_together_without_a_majority",
    "test_mismatch.py": """
        messages_that_do_not_fit forked_child_is_refused
    """,
    "test_moe.py": """
        all_libraries_train_the_same_experts ranks_refuse_together two_ranks_train_and_report
        the_large_shape_builds_without_memory
    """,
    "test_moved_dtypes.py": """
        they_move_in_all_sizes_and_layers dtypes_of_the_same_size_are_told_apart
    """,
    "test_mpi_contexts.py": "communicators_are_bounded_in_a_process",
    "test_msccl_backend.py": "a_late_rank_is_named_with_its_last_operation",
    "test_msccl_verifier.py": "counts_of_refused_and_harmless_mutants",
    "test_nccl.py": "a_full_stream_does_not_block_the_program",
    "test_newcomers.py": """
        too_few_ranks_do_not_wait_for_the_state_beforehand deaths_while_a_newcomer_gets_the_state
        what_a_newcomer_has_is_not_sent_while_the_others_wait
    """,
    "test_online.py": """
        every_group_has_its_own_trials_and_rank_0_writes_those_of_its_own
        persistent_operations_are_tuned_or_keep_the_final_choice
        equal_agreed_numbers_mean_equal_choices_despite_local_times refined_table_changes_only_refined_rules
    """,
    "test_planning.py": """
        auto_plan_keeps_the_plan_with_faster_measured_steps
        a_plan_may_leave_buckets_to_a_hierarchical_pipeline
        ranks_send_the_same_with_different_parameters_in_use
        plans_with_missing_or_duplicate_gradients_are_refused
        failed_search_restores_buckets_by_size_on_all_ranks
        auto_plan_falls_back_to_buckets_by_size_for_unsupported_gradients
        a_codec_of_the_pipeline_is_weighed_once
    """,
    "test_public.py": "the_package_works_without_requirements_of_the_command_line",
    "test_published_metrics.py": "what_cannot_be_opened_is_refused_and_what_is_down_is_logged_once",
    "test_races.py": "every_ordering_that_is_left_out_is_found",
    "test_ray.py": """
        workers_train_as_one_process workers_have_the_configuration_of_their_environment
        a_worker_that_dies_is_named ray_starts_all_workers_again nothing_is_left
    """,
    "test_reconfigure.py": """
        nothing_is_left_of_many_reconfigurations attempts_that_are_refused_change_nothing
        codecs_keep_what_they_have_not_sent
    """,
    "test_redistribute.py": "costs_of_messages_and_bytes_are_those_of_the_table",
    "test_replay.py": """
        under_a_launcher_every_process_is_a_rank messages_go_from_one_rank_to_the_other_in_every_copy
        operations_of_the_program_keep_kind_group_and_size
    """,
    "test_reset.py": """
        reset_after_an_mpi_failure_keeps_the_contexts_of_signatures reset_frees_mpi_communicators
        failed_reset_names_the_remedy groups_opened_after_an_mpi_failure_use_other_libraries
        inits_that_fail_leave_nothing_open
        operations_bound_before_an_mpi_failure_do_not_call_mpi_in_any_group
    """,
    "test_seams.py": "job_ends_well_when_one_rank_finishes_seconds_later",
    "test_serve.py": "a_server_outside_the_job_is_killed_and_comes_back",
    "test_shm_interpreter.py": """
        killed_ranks_leave_nothing_behind a_rank_that_dies_while_memory_is_opened_is_named
    """,
    "test_shm_p2p.py": "polls_of_survivors_return_false_after_a_kill",
    "test_shrink.py": """
        a_message_that_has_arrived_is_received_whether_anybody_has_looked_or_not
        one_keeper_serves_all_worlds_of_a_job_and_ends_with_it
        a_refused_attempt_does_not_end_a_build_that_others_have_not_seen_complete
        residuals_of_codecs_are_kept
    """,
    "test_signing.py": """
        operations_that_need_the_store_fail_soon_after_its_owner_dies
        forged_objects_are_refused_in_horovod_programs jobs_of_torchrun_on_one_host_are_signed
        forged_handshake_cannot_disable_signing
    """,
    "test_slurm.py": """
        torchruns_as_tasks steps_of_a_batch_job_do_not_meet a_task_that_dies_is_named nodes_are_hosts
    """,
    "test_sockets.py": "a_peer_that_reads_nothing_is_not_silent",
    "test_spatial.py": "halos_over_gloo",
    "test_special_values.py": """
        one_meaning one_meaning_of_long_vectors
    """,
    "test_startup.py": """
        kernels_from_the_cache_need_none_of_the_compiler the_sources_work_without_being_installed
        a_shrink_compiles_nothing
    """,
    "test_status_page.py": "a_stop_while_a_page_is_drawn_makes_later_pictures_no_rarer",
    "test_store_keys.py": """
        groups_that_are_closed_leave_no_keys groups_inside_of_groups_leave_no_keys
    """,
    "test_surviving.py": """
        a_host_that_tears_connections_is_not_waited_for_until_the_usual_limit one_host_after_another
        a_training_loop_on_two_hosts_goes_on half_of_the_hosts
        a_host_that_is_cut_off_while_the_others_make_the_next_world a_rank_of_two_hosts
        a_reset_beside_a_host_that_is_lost_names_it under_mpirun_rank_0_is_no_other_rank
        of_two_hosts_that_are_cut_off_from_each_other_neither_goes_on
    """,
    "test_sync.py": """
        damage_is_noticed_and_concerns_nobody_else a_receiver_that_is_late_or_idle_costs_the_source_nothing
        a_broken_connection_is_made_again finalize_ends_the_threads
    """,
    "test_sync_joining.py": """
        a_source_that_begins_again_is_joined_by_its_new_invitation receivers_that_come_and_go_leave_nothing
        sharded_sources_with_a_whole_and_a_tensor_parallel_receiver
        a_server_is_killed_in_the_middle_of_a_transfer_and_comes_back_alone
        tensors_made_in_inference_mode_and_calls_in_it damage_concerns_the_receiver_outside_alone
    """,
    "test_sync_layouts.py": """
        three_sources_and_two_receivers_at_their_own_pace damage_and_broken_connections_concern_one_receiver
        a_receiver_with_other_weights_gets_all_of_its_own_alone
        fsdp_over_tensor_parallel_layers_to_other_dtensors_and_a_whole_model
    """,
    "test_table_editing.py": """
        tables_of_other_scales_do_not_shadow_one_another shrinking_changes_no_lookup
    """,
    "test_table_writing.py": "the_locale_does_not_matter",
    "test_top.py": "jobs_that_hang_and_one_that_does_not",
    "test_torch_backend.py": """
        a_job_that_torchrun_restarts autoload_does_not_change_programs_on_other_backends
        under_the_name_of_gloo a_wrong_masquerade_is_refused the_backend_is_registered_with_torch
        ranks_that_are_restarted_read_nothing_of_earlier_attempts
    """,
    "test_torch_membership.py": """
        under_the_name_of_gloo the_default_group_without_a_rank_that_lives
    """,
    "test_torch_suite.py": "torchs_own",
    "test_traces.py": "of_events_only_what_counts_is_kept",
    "test_trials.py": """
        groups_that_share_ranks_agree_on_whose_trial_runs
        a_model_that_is_not_trained_any_more_delays_others_only_for_a_time
    """,
    "test_tuning.py": """
        tune_writes_a_table_and_resumes algorithm_files_are_compared_and_named_in_the_table
        bench_prints_rows_of_the_contract inside_a_job_of_mpirun_the_command_is_a_rank
        measurements_of_another_machine_are_refused_in_one_line a_plot_shows_the_choices_of_the_table
        the_table_notes_a_busy_machine
    """,
    "test_verify.py": """
        bits_that_flip_on_the_wire_are_found operations_in_pieces_have_the_right_results
        calls_of_a_program_raise_the_same_error bits_that_flip_in_any_piece_of_a_large_operation_are_found
        a_message_of_another_size_is_told
    """,
    "test_verify_checksums.py": "nothing_is_kept_of_operations_that_are_dropped",
    "test_waiting.py": "waits_sleep_beside_other_work",
    "test_weight_sync.py": """
        sources_that_have_dropped_the_version_of_another_lead_to_a_later_one
        a_source_that_is_gone_is_named_although_the_lead_is_there
    """,
    "test_wrap.py": """
        training_matches_ddp_on_three_ranks hook_and_optimizer_train_like_wrap
        a_parameter_belongs_to_its_latest_reducer codecs_apply_to_gradients_and_not_to_parameters
    """,
}
"""File → functions, without `test_`, of which every variant is long."""
KEPT: Final[dict[str, tuple[str, ...]]] = {
    # one job of ranks serves all variants: leaving out some would save nothing
    "test_torch_backend.py::test_two_ranks": ("",),
    # every ordering of streams: each kind of stage, each library, and codecs with and without a state
    "test_races.py::test_no_race_and_the_right_results": (
        "nccl, plain", "nccl, fused]", "nccl, arrays]", "gloo, int_shared", "gloo, topk",
    ),
    "test_interleavings.py::test_every_order": (
        "one-nccl, ", "one-gloo, plain", "one-gloo, fused", "two-nccl, fused-2"
    ),
    "test_deadlock_model.py::test_no_program_deadlocks": ("2-1-", "2-2-"),
    "test_deadlock_model.py::test_the_reduction_changes_no_verdict": ("False-all",),
    "test_agreement.py::test_no_false_alarm": ("2-700",),
    "test_agreement.py::test_no_false_alarm_where_a_rank_issues_far_ahead": ("across_hosts",),
    "test_online.py::test_the_fastest_wins_under_noise": ("1",),
    # the compiler needs seconds for each
    "test_kernels_compile.py::test_kernels_compile": ("cast",),
    # Triton's interpreter
    "test_kernels_cast.py::test_the_triton_kernels_are_the_reference": ("dtype0",),
    "test_kernels_delta.py::test_payloads_made_on_a_gpu_are_those_of_the_cpu": ("torch.bfloat16",),
    "test_kernels_delta.py::test_the_triton_kernels_are_the_reference": ("torch.float32",),
    "test_kernels_blocks.py::test_the_triton_kernels_are_the_reference": (
        "e4m3 float32", "int2_block", "int4_block hadamard", "int8_block", "sign1"
    ),
    "test_kernels_int_shared.py::test_the_triton_kernels_are_the_reference": ("4-7", "2-4095"),
    "test_kernels_topk.py::test_exact_where_a_sample_decides_and_where_it_misleads": ("0.2",),
    "test_kernels_topk.py::test_the_cpu_kernels_are_the_reference": ("1e-06", "1.0"),
    "test_kernels_topk_chunks.py::test_the_cpu_kernels_are_the_reference": ("2", "4"),
    "test_kernels_topk_chunks.py::test_what_is_left_is_what_was_not_sent": ("2",),
    "test_randk.py::test_every_value_is_drawn_equally_often": ("10-3",),
    "test_verify_checksums.py::test_flips_of_one_line_of_a_bus_do_not_cancel_each_other": ("512",),
    "test_layouts.py::test_some_pairs_on_a_mesh": ("4x2", "2x3"),
    "test_layouts.py::test_every_mutant_of_a_plan_is_found": ("3]", "4]", "2x2]"),
    "test_layouts.py::test_sums_receive_little_more_than_any_plan_must": ("2x2]",),
    "test_layouts.py::test_some_numbers_of_ranks_to_others": ("4]",),
    "test_local_steps.py::test_diloco": ("1", "2"),
    "test_msccl_verifier.py::test_mutants_are_refused_or_harmless": (
        "all_gather_direct", "all_reduce_ring", "all_to_all_direct",
    ),
    "test_msccl_verifier.py::test_the_largest_generated_algorithms_are_within_the_limits": (
        "all_reduce_halving_doubling-255",
    ),
    "test_msccl_generators.py::test_generated_algorithms_are_proved_in_place_and_out_of_place": (
        "all_reduce_all_pairs", "all_reduce_hierarchical",
    ),
    "test_advise.py::test_no_partition_and_no_library_is_better": ("5",),
    # `make test` has every shape on one rank and two, in modes and groups by turns, and every type on one.
    "test_conformance.py::test_conforms": ("one rank-", "two ranks-"),
    "test_arguments.py::test_bad_arguments_are_refused_with_nothing_sent": ("two ranks",),
    "test_arguments.py::test_bad_arguments_are_refused_alike_on_every_rank": ("two ranks",),
    "test_arguments.py::test_init_and_finalize_in_the_wrong_order_are_refused": ("two ranks",),
    # examples and benchmarks
    "test_gpt.py::test_ranks_together_are_the_model_of_one_process": ("2",),
    "test_gpt.py::test_two_ranks_train_and_report": ("data",),
    "test_moe.py::test_ranks_train_as_one_process_with_all_experts": ("2",),
    "test_cosmo.py::test_ranks_together_are_one_process": ("2",),
    "test_serve.py::test_servers_have_the_weights_of_the_trainers": ("3",),
    "test_dlrm.py::test_any_number_of_ranks_trains_the_same_model": ("2]", "3]", "5]"),
    "test_spatial.py::test_spread_layers_are_those_of_one_process": ("2-some",),
    "test_tuning.py::test_every_kind_can_be_measured_and_ranks_agree": ("mpi-2",),
    "test_explain.py::test_built_in_tables_give_a_reason_where_their_figures_favour_another_choice": (
        "mpich",
    ),
    "test_online.py::test_ranks_that_measure_different_things_agree_at_every_call": ("2-steady",),
    # random programs and mismatches
    "test_fuzz.py::test_random_programs_give_the_oracles_results": ("3-60-thread",),
    "test_mismatch.py::test_every_mismatch_is_found_and_nothing_else": ("torch-2-first-0",),
    # faults: of each class one, under either launcher
    "test_faults.py::test_survivors_report_the_missing_ranks": (
        "raises-1-ulfm", "SIGKILL-1-torch",
    ),
    "test_waiting.py::test_sleeping_ranks_detect_dead_and_stopped_peers": ("dies",),
    "test_losing.py::test_two_hosts_cut_off_from_each_other": ("wait",),
    "test_surviving.py::test_a_whole_host_of_three": ("kill-0",),
    "test_launch.py::test_signal_ends_all_ranks": ("SIGINT-mpi",),
    "test_launch.py::test_job_that_works_ends_with_0_and_leaves_nothing": ("torch",),
    "test_launch.py::test_failing_rank_ends_the_job_and_is_shown": (
        "raise-exited with status 1:-ValueError: the reason it failed-mpi",
        "kill-was killed by SIGKILL, without a word-None-mpi",
    ),
    "test_launch.py::test_the_dump_of_a_fault_is_shown_once": ("mpi",),
    "test_launch.py::test_kill_9_of_the_launcher_ends_ranks_and_the_next_start_cleans_up": ("mpi",),
    "test_launch.py::test_folders_of_a_job_are_for_their_owner_only": ("mpi",),
    "test_launch.py::test_closed_output_pipe_ends_the_job": ("mpi",),
    "test_launch.py::test_mpich": ("raise",),
    "test_launch.py::test_an_exit_before_the_import_of_mcr_plus_is_one_line": ("mpi",),
    "test_launch.py::test_a_program_finds_itself_as_when_python_runs_it": ("mpi",),
    "test_launch.py::test_all_listening_sockets_are_on_loopback": ("mpi",),
    "test_signing.py::test_forged_board_entries_fail_the_operation_and_its_group": ("row-gloo",),
    "test_membership_model.py::test_ranks_agree_and_none_is_stuck": (
        "one of three dies", "two of three die, and are silent", "ranks are silent for others",
    ),
    "test_membership_model.py::test_disabling_a_rule_reproduces_its_failure": ("last_counts",),
    "test_randk.py::test_unbiased_if_rescaled": ("False",),
    "test_reset.py::test_a_job_continues_after_failures_and_resets": ("2-mpi",),
    "test_reconfigure.py::test_a_process_that_dies": ("before",),
    "test_reconfigure.py::test_a_process_that_is_left_out_is_told_and_may_come_back": ("0",),
    "test_reconfigure.py::test_ranks_are_in_the_order_of_the_handles": ("store of an agent",),
    "test_shrink.py::test_survivors_go_on": ("shared memory-1",),
    "test_shrink.py::test_a_second_death_meanwhile": ("proposed",),
    "test_fsdp_state.py::test_shards_of_lost_ranks_come_from_their_replicas": ("victims0",),
    "test_sync.py::test_a_death_is_reported_to_those_whom_it_concerns": ("3-2",),
    "test_sync_layouts.py::test_a_death_is_reported_by_rank": ("1",),
    "test_inheritance.py::test_a_loss_while_it_is_taken_over": ("asked",),
    "test_local.py::test_a_rank_that_is_killed_costs_at_most_a_round": ("1-9-3",),
    "test_late_ranks_on_hosts.py::test_the_rank_that_sleeps_in_its_backward_pass_is_named_on_all_hosts": (
        "1-",
    ),
    "test_slurm.py::test_tasks_of_a_step_are_ranks": ("meet",),
    "test_slurm.py::test_mpi_under_srun": ("pmix",),
    "test_cli.py::test_bad_options_about_failed_ranks": (
        "--min-ranks 0", "--min-ranks 3", "--min-ranks 1 --restart", "--restart", "--min-ranks 1 --via",
    ),
    # layers on two ranks, or on few
    "test_groups.py::test_messages_of_one_thread_beside_collectives_of_another": ("torch-msccl",),
    "test_clients.py::test_a_backward_pass_that_fails_raises": ("static",),
    "test_hierarchical.py::test_results": ("shared memory, gloo]",),
    "test_compressed.py::test_every_codec_on_every_operation": ("2-backends0-True",),
    "test_wrap.py::test_training_matches_ddp": ("some-mpi",),
    "test_expert.py::test_as_one_process_with_all_experts": ("2",),
    "test_default_device.py::test_cpu_tensors_under_another_default_device": ("mpi",),
    "test_mpi_contexts.py::test_operations_that_start_later_pass_the_gate_once": ("2",),
    "test_clients.py::test_client_trains_as_on_gloo": (
        "ddp-plain", "ddp-no_sync", "ddp-join-", "ddp-zero", "ddp-powersgd_hook", "fsdp-", "pipelining-gpipe",
        "tensor-dtensor-", "tensor-tensor_parallel", "tensor-mesh", "with_",
    ),
    "test_feedback.py::test_error_feedback_recovers_the_compression_error": ("2-AVG",),
    "test_delta.py::test_every_kind_brings_all_bits": ("shared memory-2",),
    "test_delta.py::test_what_is_kept_is_bounded_and_what_is_dropped_comes_whole": ("2",),
    "test_failover.py::test_all_results_are_right_whenever_a_library_breaks": ("2-gloo->msccl",),
    "test_layout_autograd.py::test_gradients_are_those_of_one_process": ("some",),
    "test_dtensor.py::test_redistribution_between_meshes_and_within_planned": ("some pairs",),
    "test_dtensor.py::test_uneven_shards_on_flattened_meshes_within_planned": ("some pairs",),
    "test_redistribute.py::test_any_layout_to_any_other": ("2-msccl",),
    "test_redistribute.py::test_plans_are_kept_and_calls_may_be_in_flight_together": ("3-msccl",),
    "test_redistribute.py::test_by_messages_between_pairs_of_ranks": ("calls-msccl",),
    "test_redistribute.py::test_collectives_in_groups_of_one_and_into_other_local_tensors": ("3-gloo",),
    "test_redistribute.py::test_addends_are_kept_where_the_target_is_the_source": ("2-mpi",),
    "test_redistribute.py::test_plans_and_buffers_that_are_kept": ("limits",),
    "test_redistribute.py::test_later_calls_do_not_wait_for_ranks_that_are_late": ("msccl",),
    "test_redistribute.py::test_a_state_of_many_tensors_in_one_round_and_in_many": ("3-msccl",),
    "test_redistribute.py::test_a_codec_leaves_replicas_with_the_same_bits": ("2-gloo",),
    "test_redistribute.py::test_bad_calls_are_refused_on_all_ranks_alike": ("2-mpi",),
    "test_compiled_models.py::test_the_faster_cuts_stay_alike_on_all_ranks": ("whole",),
    "test_verify.py::test_every_flipped_bit_is_found_on_all_ranks_alike": ("2-msccl",),
    "test_sync.py::test_every_version_arrives_bit_for_bit": ("gloo",),
    "test_fuse.py::test_all_kinds_fused_in_flight_give_correct_results": ("2-mpi",),
    "test_msccl_backend.py::test_every_algorithm_by_name": ("2",),
    "test_shm_interpreter.py::test_results": ("2",),
}  # fmt: skip
"""Function → how the names of its variants begin that stay; the others are long."""
