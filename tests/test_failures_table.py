"""Every failure that is normal (DESIGN 9), and the tests that make it happen."""

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FAILURES: dict[str, tuple[str, ...]] = {
    # -- those of DESIGN 9 --------------------------------------------------------------------------
    "driver unloaded or reloaded": (
        "whole.test_failures::test_driver_unloaded_and_loaded_again",
        "whole.test_failures::test_release_lets_go_and_resume_takes_up_again",
        "host.test_nvml_faults::test_the_driver_is_unloaded_and_loaded_again",
    ),
    "GPU lost or needing reset": (
        "whole.test_failures::test_a_lost_card_and_its_return",
        "whole.test_failures::test_a_card_that_fails_while_its_limit_is_held",
        "act.test_reconcile::test_a_lost_card_that_returns_is_still_ours",
    ),
    "NVML hanging": (
        "whole.test_failures::test_a_hanging_call_blinds_one_card_and_nothing_else",
        "whole.test_failures::test_the_child_that_reads_the_driver_may_die",
        "whole.test_last_resorts::test_a_stop_while_the_driver_hangs_puts_back_what_it_can_and_says_the_rest",
        "host.test_nvml_faults::test_when_the_whole_driver_hangs_everything_is_blind_and_comes_back",
    ),
    "MPS daemon dead": (
        "whole.test_failures_mps::test_a_control_daemon_that_dies_is_said_once_in_each_direction",
        "sense.test_mps::test_a_daemon_that_dies_is_said_once_in_each_direction",
        "host.test_mps_real::test_no_daemon_is_no_failure",
    ),
    "MPS daemon faulted": (
        "whole.test_failures_mps::test_a_server_that_faults_is_said_once_with_everybody_it_reaches",
        "sense.test_mps::test_a_fault_names_everybody_who_shares_the_server",
    ),
    "cgroup gone mid-write": (
        "whole.test_failures::test_the_cgroup_vanishes_while_it_is_held",
        "host.test_cgroups::test_folders_that_vanish_and_come_back_while_we_write",
        "host.test_cgroups::test_a_real_cgroup_removed_under_an_open_folder_is_gone",
        "act.test_reconcile::test_a_gone_target_is_no_failure",
    ),
    "read-only cgroup mount": (
        "whole.test_failures::test_a_file_that_cannot_be_written_is_refused_with_the_reason",
        "whole.test_failures_state::test_a_tree_that_becomes_read_only_while_it_is_held_is_said_and_put_back_later",
        "whole.test_failures::test_without_cgroup_v2_the_agent_says_so_and_goes_on",
        "host.test_cgroups::test_a_mount_that_is_read_only_is_refused_with_the_remedy",
    ),
    "D-Bus that takes seconds": (
        "whole.test_failures_systemd::test_a_systemd_that_takes_seconds_for_an_answer",
        "whole.test_failures_systemd::test_a_systemd_that_never_answers",
        "host.test_units::test_a_systemd_that_does_not_answer_is_given_up_and_asked_again",
    ),
    "a driver call that takes seconds": (
        "whole.test_failures_tools::test_a_driver_that_takes_seconds_for_a_write",
        "act.test_reconcile::test_a_slow_target_holds_up_nobody",
        "host.test_nvml_control::test_a_write_that_hangs_is_reported_and_blinds_the_card",
    ),
    "state disk full": (
        "whole.test_failures::test_a_full_disk_stops_new_changes_but_no_putting_back",
        "whole.test_failures::test_with_a_full_disk_from_the_start_nothing_is_changed",
        "act.test_ledger::test_a_full_disk_refuses_intents_and_loses_nothing",
    ),
    "clock stepped": (
        "whole.test_failures_state::test_a_clock_that_is_stepped_changes_no_hold",
        "test_replay::test_a_stepped_clock_changes_no_plan",
        "test_tokens::test_a_clock_set_back_makes_nothing_valid_again",
        "model.test_hours::test_it_is_the_clock_on_the_wall_that_counts",
    ),
    "configuration broken at reload": (
        "whole.test_failures::test_a_broken_configuration_at_reload_changes_nothing",
        "whole.test_last_resorts::test_restore_works_with_a_broken_file",
        "e2e.checks::check_reload_of_a_broken_file_changes_nothing",
    ),
    "a tenant that exits between reading and acting": (
        "sense.test_tenants_real::test_a_tenant_that_exits_between_the_drivers_list_and_us",
        "act.test_terminate::test_one_that_went_by_itself_is_gone_and_no_error",
        "act.test_terminate::test_another_with_its_number_is_gone",
        "act.test_notice::test_a_process_that_has_gone_is_passed_over",
        "host.test_ender::test_another_with_its_number_is_never_hit",
        "host.test_checkpoint::test_one_that_ends_in_between_is_gone",
    ),
    "a hostile process name": (
        "whole.test_failures::test_hostile_names_do_no_harm",
        "host.test_procfs::test_hostile_names",
        "host.test_procfs::test_hostile_cgroups_and_executables_stay_one_printable_line",
    ),
    "two agents started at once": (
        "whole.test_failures::test_the_second_agent_refuses_and_the_first_goes_on",
        "whole.test_failures::test_a_socket_that_somebody_else_uses",
        "act.test_statedir::test_a_second_holder_is_refused_with_the_pid_of_the_first",
    ),
    "no GPU at all": (
        "whole.test_failures::test_no_card_at_all_and_then_one",
        "whole.test_failures::test_no_library_at_all",
        "host.test_nvml_faults::test_a_driver_that_appears_is_found",
    ),
    "a bug in a policy": (
        "whole.test_failures::test_a_bug_in_a_policy_ends_the_run_puts_back_and_leaves_a_record",
        "whole.test_last_resorts::test_a_fault_in_a_lane_is_exit_70_with_a_dump_that_replays",
        "test_loop_clock::test_a_policy_that_fails_ends_the_run_and_the_sensors",
    ),
    "the third crash within ten minutes": (
        "whole.test_failures::test_the_third_crash_within_ten_minutes_only_observes",
        "whole.test_last_resorts::test_a_demoted_agent_holds_the_budget_and_a_pause_ends_that",
        "test_starts::test_the_third_crash_within_ten_minutes_is_one_too_many",
    ),
    # -- those of the parts that came later ---------------------------------------------------------
    "guard process killed or stopped": (
        "whole.test_failures_guard::test_a_guard_that_is_killed_or_stopped_is_replaced",
        "host.test_freezer::test_the_death_of_the_guard_thaws_at_once_and_another_takes_over",
        "act.test_freeze::test_while_the_guard_is_dead_it_stays_ours",
    ),
    "agent killed or stopped in a pulse": (
        "whole.test_failures_guard::test_a_daemon_that_is_killed_or_stopped_in_a_pulse_leaves_nobody_frozen",
        "whole.test_frozen::test_nothing_stays_frozen",
    ),
    "cuda-checkpoint hanging in any step": (
        "whole.test_failures_tools::test_a_checkpoint_tool_that_hangs_in_each_step_in_turn",
        "whole.test_failures_tools::test_a_lock_that_never_comes_about_is_given_up_and_said",
        "host.test_checkpoint::test_whatever_goes_wrong_what_is_said_is_so",
    ),
    "a stop without the device memory that resuming needs": (
        "whole.test_failures_tools::test_a_stop_without_room_to_resume_says_so_and_a_restore_does_it",
        "act.test_suspend::test_a_resumption_without_room_keeps_its_place_on_its_cards_for_a_while",
        "act.test_suspend::test_a_later_run_knows_what_room_is_needed",
        "act.test_suspend::test_where_all_is_put_back_nobody_waits_for_another",
    ),
    "cuda-checkpoint lying": (
        "host.test_checkpoint::test_the_exit_code_of_a_suspension_says_nothing",
        "host.test_checkpoint::test_a_checkpoint_that_frees_nothing_is_undone",
    ),
    "nvidia-smi lying or hanging": (
        "whole.test_failures_tools::test_an_nvidia_smi_that_lies_is_said_once_and_believed_in_nothing",
        "whole.test_failures_tools::test_an_nvidia_smi_that_hangs",
        "host.test_nvidia_smi::test_the_exit_code_says_nothing",
    ),
    "the latency source of an L1 endless, slow or down": (
        "whole.test_failures_state::test_a_page_of_latency_without_end_holds_up_nothing",
        "whole.test_latency_source::test_it_is_read_told_and_no_longer_read_after_a_reload",
        "sense.test_sources::test_a_failure_is_told_once_in_each_direction",
        "sense.test_sources::test_a_failure_soon_after_the_first_success_is_told_without_delay",
        "host.test_pages::test_what_does_not_end_ends_at_its_deadline",
    ),
    "runs.json torn": (
        "whole.test_failures_state::test_a_torn_list_of_runs_costs_reservations_and_nothing_else",
        "test_runbook::test_whatever_the_file_holds_it_starts",
    ),
    "runs.json on a full disk": (
        "whole.test_failures_state::test_on_a_full_disk_nothing_is_started_that_a_restart_would_forget",
        "test_runbook::test_what_cannot_be_kept_is_not_admitted",
    ),
    "D-Bus gone while something is held": (
        "whole.test_failures_systemd::test_the_bus_is_gone_while_something_is_held_and_comes_back",
        "whole.test_failures_systemd::test_a_stop_without_a_bus_says_what_is_left_and_a_restore_does_it",
        "host.test_units::test_a_lost_bus_is_connected_to_again",
    ),
    "systemd starting a unit again while our value is held": (
        "whole.test_failures_systemd::test_a_unit_that_is_started_again_while_it_is_held",
        "act.test_controlfile::test_a_restarted_unit_is_given_back_before_it_is_held_again",
        "e2e.checks::check_restart_of_the_tenant",
    ),
    "an MPS daemon of our own that dies under clients": (
        "whole.test_failures_mps::test_a_daemon_of_our_own_that_dies_under_its_clients_is_started_again",
        "act.test_mps::test_a_daemon_of_our_own_is_started_and_started_again",
    ),
    "an MPS daemon of our own whose server cannot start": (
        "whole.test_failures_mps::test_a_daemon_of_our_own_whose_server_cannot_start_is_not_left",
        "host.test_mps_real::test_a_daemon_whose_server_dies_is_taken_down_again",
    ),
    "state directory read-only or unusable": (
        "whole.test_failures_state::test_a_state_disk_that_breaks_stops_new_changes_but_no_putting_back",
        "whole.test_failures_state::test_a_state_directory_that_is_read_only_from_the_start_is_a_clear_error",
        "whole.test_failures::test_a_state_directory_that_is_a_file_is_a_clear_error",
        "act.test_statedir::test_a_place_that_cannot_be_used_is_refused",
    ),
    "ledger torn": (
        "whole.test_failures::test_a_torn_ledger_loses_only_what_was_torn",
        "act.test_ledger::test_a_torn_last_line_never_loses_the_others",
    ),
    "a log or an audit log that nobody reads": (
        "whole.test_stuck::test_a_log_that_nobody_reads_stops_nothing",
        "whole.test_stuck::test_an_audit_log_that_is_a_pipe_holds_up_neither_the_end_nor_a_restore",
    ),
    "configuration broken at start": (
        "whole.test_failures::test_a_broken_configuration_at_start_is_exit_code_two",
    ),
    "stopped in the midst of a start": (
        "whole.test_failures::test_a_daemon_that_is_stopped_while_it_starts_leaves_nothing",
    ),
    "a socket of an agent that was killed": (
        "whole.test_failures::test_a_stale_socket_is_replaced",
    ),
}

NO_FAILURES = {
    "whole.test_failures::test_the_service_manager_is_told",
    "whole.test_failures::test_the_fake_driver_is_what_the_daemon_reads",
}
"""In those files for another reason."""


@cache
def functions(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_has_tests_that_are_collected(failure: str) -> None:
    assert FAILURES[failure]
    for name in FAILURES[failure]:
        module, _, function = name.partition("::")
        loaded = importlib.import_module(f"tests.{module}")
        assert function.startswith(("test_", "check_")), name
        assert callable(getattr(loaded, function, None)), f"there is no {name}"
        assert loaded.__file__ is not None
        assert function in functions(Path(loaded.__file__)), f"{name} is defined elsewhere"


def test_every_failure_of_a_running_daemon_is_in_the_table() -> None:
    listed = {name for names in FAILURES.values() for name in names} | NO_FAILURES
    made = {
        f"whole.{file.stem}::{name}"
        for file in (TESTS / "whole").glob("test_failures*.py")
        for name in functions(file)
        if name.startswith("test_")
    }
    assert made
    assert made <= listed, made - listed
