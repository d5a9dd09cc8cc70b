"""What `make test` guarantees, each with the test that would fail without it.

`tests/test_homes.py` fails where one of these tests is gone or has moved to another home.
"""

from __future__ import annotations

_CHECKPOINT = "tests/checkpoint/test_checkpoint"
_END = "tests/end_to_end/test"
_SUPERVISE = "tests/supervise/test"

GUARANTEES: dict[str, str] = {
    # The main path.
    "one line trains on two nodes of a real Slurm as one process does": (
        f"{_END}_run_on_slurm.py::test_one_line_trains_on_two_nodes_like_one_process"
    ),
    "a run here is stopped, continued, exported and swept by cold command lines": (
        f"{_END}_main_path_here.py::test_a_run_is_stopped_continued_exported_and_swept"
    ),
    "sbatch gets the script as it is": (
        "tests/request/test_submission.py::test_sbatch_gets_the_script_as_it_is_and_its_answer_is_read"
    ),
    "a job that is in the queue is never submitted twice": (
        "tests/request/test_submission.py::test_a_job_that_is_in_the_queue_was_submitted_whatever_is_printed"
    ),
    "no second job starts beside one of another cluster that may still run": (
        "tests/cli/test_other_cluster.py::test_a_second_job_starts_only_beside_one_that_is_known_to_be_over"
    ),
    "a flag typed for Slurm takes no GPU away": (
        "tests/request/test_typed_flags.py::test_other_resources_leave_the_job_and_its_steps_their_gpus"
    ),
    "what a program reads of the shell, and its job lacks, is named": (
        "tests/plan/test_shell_variables.py::test_what_a_program_reads_from_its_environment_is_found"
    ),
    "the code that runs is the code that was submitted": (
        "tests/code/test_snapshot.py::test_whatever_touches_a_copy_is_found_and_named"
    ),
    "the login half imports without torch": "tests/test_architecture.py::test_the_login_half_imports_no_torch",
    # Coming back.
    "a preemption brings the run back by itself": (
        f"{_END}_run_on_slurm.py::test_preemption_brings_the_run_back_by_itself"
    ),
    "scancel ends a run, resume continues it": (
        f"{_END}_run_on_slurm.py::test_scancel_ends_a_run_and_resume_continues_it"
    ),
    "an element of an array comes back and the others never notice": (
        f"{_END}_sweep_on_slurm.py::test_an_element_that_loses_a_rank_continues_and_the_others_never_notice"
    ),
    "the preemption of an element of an array restarts no other": (
        f"{_END}_sweep_on_slurm.py::test_the_preemption_of_an_element_restarts_no_other"
    ),
    "a killed rank, or a killed srun, costs no run": (
        f"{_END}_returns_on_slurm.py::test_killed_processes_of_a_job_cost_no_run"
    ),
    "a cancel at any moment wins": f"{_SUPERVISE}_cancel_races.py::test_a_cancel_at_any_moment_wins",
    "a killed rank is started again within the allocation": (
        f"{_SUPERVISE}_supervisor.py::test_failures_are_started_again_here_until_three_bring_no_step"
    ),
    "what follows from an end is a pure function": f"{_SUPERVISE}_decision.py::test_what_follows_from_what_is_known",
    "a refused requeue is final, an unanswered one is tried again": (
        f"{_SUPERVISE}_job.py::test_a_job_comes_back_after_the_controller_does"
    ),
    "a node that does not see the run is named": (
        f"{_END}_run_on_slurm.py::test_a_node_that_does_not_see_the_run_is_named"
    ),
    "failures without progress stop the run with a reason": (
        f"{_SUPERVISE}_supervisor.py::test_time_limits_without_a_new_checkpoint_stop_the_run_with_a_reason"
    ),
    "an attempt that was overtaken writes nothing more": (
        f"{_SUPERVISE}_supervisor.py::test_an_overtaken_supervisor_writes_nothing_more"
    ),
    # Checkpoints.
    "a save survives a kill at any call": f"{_CHECKPOINT}_faults.py::test_killed_at_any_call",
    "a save survives a refusal at any call": f"{_CHECKPOINT}_faults.py::test_refused_at_any_call",
    "a save survives a power cut after any call": f"{_CHECKPOINT}_faults.py::test_power_lost_after_any_call",
    "the check of kills and power cuts can fail": (
        f"{_CHECKPOINT}_faults.py::test_the_check_of_kills_and_power_cuts_can_fail"
    ),
    "every truncation, flipped bit and hole is found": (
        f"{_CHECKPOINT}_faults.py::test_every_truncation_flipped_bit_and_hole_is_found"
    ),
    "a writer that wakes up late removes nothing of its successor": (
        f"{_CHECKPOINT}_faults.py::test_a_stopped_writer_that_goes_on_removes_nothing_of_its_successor"
    ),
    "the newest checkpoint that verifies wins": (
        f"{_CHECKPOINT}_manifest.py::test_newest_that_verifies_wins_and_the_others_are_reported"
    ),
    "the fence is checked right before the rename": (
        f"{_CHECKPOINT}_commit.py::test_the_fence_is_checked_right_before_the_rename"
    ),
    "retention keeps the newest whole ones": f"{_CHECKPOINT}_commit.py::test_the_newest_whole_ones_stay",
    "loading a checkpoint runs nothing that a file names": (
        f"{_CHECKPOINT}_forged.py::test_metadata_that_is_code_is_refused_although_every_hash_fits"
    ),
    "a save in the background changes no bit": (
        f"{_CHECKPOINT}_saves.py::test_background_saves_change_no_bit_and_every_one_verifies"
    ),
    # Training.
    "training gives the weights of a plain loop": (
        "tests/train/test_looking.py::test_training_gives_the_weights_of_a_plain_loop"
    ),
    "a stop that reaches one rank stops all, and the resume is bitwise": (
        "tests/train/test_trainer.py::test_term_on_one_rank_stops_all_and_resuming_is_bitwise_exact"
    ),
    "a stop after the exchange of a step ends all ranks at the next": (
        "tests/train/test_trainer.py"
        "::test_a_stop_requested_on_one_rank_after_the_exchange_of_a_step_ends_all_ranks_at_the_next_step"
    ),
    "another number of ranks trains alike": (
        "tests/train/test_trainer.py::test_a_run_on_other_numbers_of_ranks_trains_as_one_that_never_changed"
    ),
    "layouts train as one process": "tests/train/test_layouts.py::test_losses_and_weights_are_those_of_one_process",
    "a pipeline trains as one process": "tests/train/test_layouts.py::test_a_pipeline_trains_as_one_process",
    "a run goes on under another layout": (
        "tests/train/test_layouts.py::test_a_run_goes_on_under_another_layout_and_back"
    ),
    "each sample appears exactly once in an epoch": "tests/data/test_order.py::test_every_sample_appears_exactly_once",
    "the order of samples is the same for ever": "tests/data/test_order.py::test_order_is_the_same_for_ever",
    "a step that is skipped leaves no trace in buffers": (
        "tests/train/test_step.py::test_a_step_that_is_not_applied_leaves_the_buffers_as_they_were"
    ),
    "the same weights have the same evaluation at each step and on any number of ranks": (
        "tests/train/test_evaluate.py::test_noise_of_a_model_depends_on_the_samples_alone"
    ),
    # Programs of people.
    "a program's training goes on bit for bit": "tests/session/test_training.py::test_everything_goes_on_bit_for_bit",
    "a program on shards that is stopped by Ctrl-C has the losses of an undisturbed one": (
        f"{_END}_own_programs_here.py::test_a_stopped_program_has_the_losses_of_an_undisturbed_one"
    ),
    "a program's save is durable and is resumed from": (
        "tests/session/test_session.py::test_a_save_is_durable_with_its_metrics_and_is_resumed_from"
    ),
    # Watching.
    "nobody hangs while anybody makes progress": (
        f"{_SUPERVISE}_hang.py::test_nobody_hangs_while_anybody_makes_progress"
    ),
    "a hang has the limit of whoever is behind": (
        f"{_SUPERVISE}_hang.py::test_the_limit_is_that_of_the_phase_of_whoever_is_behind"
    ),
    "the first rank to fail is named": (
        f"{_SUPERVISE}_supervisor.py::test_the_first_rank_to_fail_is_named_and_its_code_counts"
    ),
}
