"""The rules by which the local runner starts, restarts and ends the tasks of a job group."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from local_runner import spec
from local_runner.directory import read_nodes, state_of
from tests.local_runner.runner import HEADER, OUTPUT, Runner, is_running, run, task
from tests.waiting import bytes_in, wait_until

DONE = task("ppo-trainer", "exit 0")


def recovery(**fields):
    return {"job_recovery": fields}


def test_the_exit_code_is_the_trainers(tmp_path):
    assert run(tmp_path, task("ppo-trainer", "exit 0")).exit_code == 0
    assert run(tmp_path, task("ppo-trainer", "exit 7")).exit_code == 7


def test_a_task_sees_what_skypilot_sets(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "env", num_nodes=2), task("reward-server", "exec sleep 60"))
    for rank in (0, 1):
        variables = dict(line.split("=", 1) for line in ended.log("ppo-trainer", rank).splitlines() if "=" in line)
        assert variables["SKYPILOT_JOBGROUP_NAME"] == "group"
        assert variables["SKYPILOT_NODE_RANK"] == str(rank)
        assert variables["SKYPILOT_NUM_NODES"] == "2"
        assert variables["SKYPILOT_NUM_GPUS_PER_NODE"] == "0"
        assert variables["RUN_ID"] == "test"
        endpoints = json.loads(variables["JOBGROUP_ENDPOINTS"])
        assert {"reward-server-0:8002", "ppo-trainer-0:8004", "ppo-trainer-1:29500"} <= endpoints.keys()
        assert endpoints["ppo-trainer-1:8004"].startswith(endpoints["ppo-trainer-1:29500"].rpartition(":")[0])


def test_every_node_has_a_log_of_its_own(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "echo out $SKYPILOT_NODE_RANK; echo err >&2", num_nodes=2))
    assert ended.log("ppo-trainer", 0).splitlines()[1:] == ["out 0", "err"]
    assert ended.log("ppo-trainer", 1).splitlines()[1:] == ["out 1", "err"]


def test_a_task_restarts_while_its_budget_lasts(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "echo x >> starts; exit 5", resources=recovery(max_restarts_on_errors=1)))
    assert ended.exit_code == 5
    assert (tmp_path / "starts").read_text().split() == ["x", "x"]
    assert ended.record["restarts"] == {"ppo-trainer": 1}
    assert "after 1 of 1 restarts on errors" in ended.output


def test_recoverable_exit_codes_cost_no_budget(tmp_path):
    command = "echo x >> starts; if [ $(wc -l < starts) -lt 3 ]; then exit 33; fi"
    fields = recovery(max_restarts_on_errors=0, recover_on_exit_codes=[33])
    ended = run(tmp_path, task("ppo-trainer", command, resources=fields))
    assert ended.exit_code == 0
    assert ended.record["restarts"] == {"ppo-trainer": 2}


def test_recoverable_exit_codes_leave_the_budget_to_errors(tmp_path):
    # Lost, failed, lost, failed: the second error is one too many, and the losses between are not counted.
    command = "echo x >> starts; case $(wc -l < starts) in 1 | 3) exit 33 ;; *) exit 5 ;; esac"
    fields = recovery(max_restarts_on_errors=1, recover_on_exit_codes=[33])
    ended = run(tmp_path, task("ppo-trainer", command, resources=fields))
    assert ended.exit_code == 5
    assert ended.record["restarts"] == {"ppo-trainer": 3}


def test_without_job_recovery_nothing_is_restarted(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "echo x >> starts; exit 33"))
    assert ended.exit_code == 33
    assert (tmp_path / "starts").read_text().split() == ["x"]


def test_a_task_succeeds_when_all_its_nodes_have(tmp_path):
    command = "if [ $SKYPILOT_NODE_RANK = 1 ]; then sleep 1; touch late; fi"
    assert run(tmp_path, task("ppo-trainer", command, num_nodes=2)).exit_code == 0
    assert (tmp_path / "late").exists()


def test_a_node_killed_for_another_ones_failure_does_not_hide_its_exit_code(tmp_path):
    command = "if [ $SKYPILOT_NODE_RANK = 1 ]; then exit 7; fi; exec sleep 60"
    ended = run(tmp_path, task("ppo-trainer", command, num_nodes=2))
    assert ended.exit_code == 7
    assert "ppo-trainer-0 stopped, exit code 137" in ended.output


def test_a_node_that_was_killed_is_replaced_and_a_command_that_was_killed_is_an_error(tmp_path):
    command = "echo x >> starts; if [ $(wc -l < starts) = 1 ]; then {}; fi"
    recoverable = recovery(recover_on_exit_codes=[33])
    codes = []
    for name, kill in (("node", "kill -9 $$"), ("command", "bash -c 'kill -9 $$'; exit $?")):
        (tmp_path / name).mkdir()
        ended = run(tmp_path / name, task("ppo-trainer", command.format(kill), resources=recoverable))
        codes.append(ended.exit_code)
    assert codes == [0, 137]


@pytest.mark.parametrize(("command", "starts", "code"), [("exit 78", 1, 78), ("bash -c 'kill -9 $$'", 4, 137)])
def test_commands_of_the_job_groups_restart_after_crashes_and_not_after_wrong_settings(tmp_path, command, starts, code):
    group = spec.load(Path(__file__).parents[2] / "jobgroup.yaml")
    [trainer] = [one for one in group.tasks if one.is_primary]
    end = trainer.run.partition("||")[2].strip()
    fields = recovery(recover_on_exit_codes=sorted(trainer.recover_on_exit_codes))
    ended = run(tmp_path, task("ppo-trainer", f"echo x >> starts; ({command}) || {end}", resources=fields))
    assert ended.exit_code == code
    assert len((tmp_path / "starts").read_text().split()) == starts


def test_the_run_ends_when_all_primary_tasks_have_succeeded(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", "touch first"),
        task("collector", "until [ -e first ]; do sleep 0.01; done; sleep 1; touch second"),
        task("reward-server", "until [ -e second ]; do sleep 0.01; done; touch saw-both; exec sleep 60"),
        header=HEADER.replace("[ppo-trainer]", "[ppo-trainer, collector]") + "termination_delay: 2s\n",
    )
    assert ended.exit_code == 0
    assert (tmp_path / "saw-both").exists()


def test_the_run_fails_with_the_first_primary_task_that_does(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", "exec sleep 3600"),
        task("collector", "exit 9"),
        header=HEADER.replace("[ppo-trainer]", "[ppo-trainer, collector]"),
    )
    assert ended.exit_code == 9


def test_an_auxiliary_that_is_gone_for_good_does_not_fail_the_run(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", f"until grep -q 'reward-server failed' {OUTPUT}; do sleep 0.05; done"),
        task("reward-server", "exit 1"),
    )
    assert ended.exit_code == 0
    assert "reward-server failed, exit code 1" in ended.output


def test_an_auxiliary_that_succeeds_is_not_started_again(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", f"until grep -q 'reward-server-0 ended' {OUTPUT}; do sleep 0.05; done; sleep 1"),
        task("reward-server", "echo x >> starts", resources=recovery(max_restarts_on_errors=3)),
    )
    assert ended.exit_code == 0
    assert (tmp_path / "starts").read_text().split() == ["x"]


def test_auxiliaries_stay_while_the_trainer_is_restarted(tmp_path):
    ended = run(
        tmp_path,
        task(
            "ppo-trainer",
            "until [ -e up ]; do sleep 0.01; done; echo x >> starts; if [ $(wc -l < starts) = 1 ]; then exit 33; fi",
            resources=recovery(recover_on_exit_codes=[33]),
        ),
        task("reward-server", "echo x >> service-starts; touch up; exec sleep 60"),
    )
    assert ended.exit_code == 0
    assert ended.record["restarts"] == {"ppo-trainer": 1}
    assert (tmp_path / "service-starts").read_text().split() == ["x"]


def test_one_failing_node_restarts_all_nodes_of_its_task(tmp_path):
    command = """
        echo x >> starts-$SKYPILOT_NODE_RANK
        if [ $SKYPILOT_NODE_RANK = 1 ] && [ $(wc -l < starts-1) = 1 ]; then
          until [ -e starts-0 ]; do sleep 0.01; done; exit 33
        fi
        if [ $(wc -l < starts-0) = 1 ]; then sleep 60; fi
    """
    ended = run(tmp_path, task("ppo-trainer", command, num_nodes=2, resources=recovery(recover_on_exit_codes=[33])))
    assert ended.exit_code == 0
    assert (tmp_path / "starts-0").read_text().split() == ["x", "x"]
    assert "ppo-trainer-0 stopped, exit code 137" in ended.output


def test_a_failing_auxiliary_restarts_without_the_others_noticing(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", "until [ -e again ]; do sleep 0.01; done"),
        task(
            "reward-server",
            "if [ -e once ]; then touch again; exec sleep 60; fi; touch once; exit 1",
            resources=recovery(max_restarts_on_errors=1),
        ),
    )
    assert ended.exit_code == 0
    assert ended.record["restarts"] == {"reward-server": 1}


def test_a_wrong_configuration_stops_the_run_without_restarts(tmp_path):
    resources = recovery(max_restarts_on_errors=5, recover_on_exit_codes=[33])
    ended = run(
        tmp_path,
        task("ppo-trainer", "exec sleep 60"),
        task("data-server", "echo x >> starts; echo DATASET is missing >&2; exit 78", resources=resources),
    )
    assert ended.exit_code == 78
    assert (tmp_path / "starts").read_text().split() == ["x"]
    assert "DATASET is missing" in ended.output
    assert "data-server cannot run as it is configured" in ended.output


def test_a_trainer_is_not_restarted_for_ever_when_a_service_is_gone_for_good(tmp_path):
    ended = run(
        tmp_path,
        task(
            "ppo-trainer",
            "until [ -e gone ]; do sleep 0.01; done; sleep 0.3; exit 33",
            resources=recovery(recover_on_exit_codes=[33]),
        ),
        task("reward-server", "touch gone; exit 1"),
    )
    assert ended.exit_code == 33
    # A busy machine may tell of the trainer's end first; the next one comes after the reward-server's.
    assert ended.record["restarts"].get("ppo-trainer", 0) <= 1
    assert "not restarted, since reward-server failed for good" in ended.output


def test_auxiliaries_outlive_the_trainer_by_their_delay(tmp_path):
    def auxiliary(name: str) -> str:
        return task(name, f"trap 'touch {name}-ended; exit 0' TERM; touch {name}-up; while :; do sleep 0.05; done")

    ended = run(
        tmp_path,
        task(
            "ppo-trainer",
            "until [ -e replay-buffer-up ] && [ -e reward-server-up ]; do sleep 0.05; done; touch ppo-trainer-ended",
        ),
        auxiliary("replay-buffer"),
        auxiliary("reward-server"),
        header=HEADER + "termination_delay: {default: 0s, replay-buffer: 3s}\n",
    )
    assert ended.exit_code == 0
    times = {
        name: (tmp_path / f"{name}-ended").stat().st_mtime for name in ("ppo-trainer", "replay-buffer", "reward-server")
    }
    assert times["replay-buffer"] - times["ppo-trainer"] >= 3
    assert times["reward-server"] < times["replay-buffer"]


def test_auxiliaries_end_at_once_when_the_trainer_fails(tmp_path):
    ended = run(
        tmp_path,
        task("ppo-trainer", "exit 1"),
        task("replay-buffer", "exec sleep 3600"),
        header=HEADER + "termination_delay: 1h\n",
    )
    assert ended.exit_code == 1


@pytest.mark.parametrize(("trainer", "said"), [("exit 0", "ended, with the run"), ("exit 1", "stopped, exit code 143")])
def test_an_auxiliary_that_the_end_of_the_run_ends_has_not_failed(tmp_path, trainer, said):
    # A shell that waits for a child ends by SIGTERM, as a component does whose command handles no signals.
    wait = "until [ -e up ]; do sleep 0.05; done;"
    tasks = task("ppo-trainer", f"{wait} {trainer}"), task("data-server", "touch up; exec sleep 60")
    assert f"data-server-0 {said}" in run(tmp_path, *tasks).output.splitlines()


def test_an_auxiliary_may_finish_its_work_when_asked_to_end(tmp_path):
    run(
        tmp_path,
        task("ppo-trainer", "until [ -e up ]; do sleep 0.01; done"),
        task("replay-buffer", "trap 'sleep 0.5; touch flushed; exit 0' TERM; touch up; while :; do sleep 0.05; done"),
    )
    assert (tmp_path / "flushed").exists()


def test_ctrl_c_ends_every_process_however_stubborn(tmp_path):
    (tmp_path / "stubborn.sh").write_text(
        "for i in 1 2; do (trap '' TERM; sleep 3600 & echo $! >> pids; wait) & done\n"
        "trap '' TERM; echo $$ >> pids; touch started; while :; do sleep 1; done\n"
    )
    tasks = task("ppo-trainer", "exec bash stubborn.sh"), task("reward-server", "exec sleep 300")
    runner = Runner(tmp_path, *tasks, stop_seconds=1)
    runner.wait_for("started")
    runner.send(signal.SIGINT)
    ended = runner.end()
    assert ended.exit_code == 130
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if is_running(int(pid))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_requests_to_end_are_as_good_as_ctrl_c(tmp_path, number):
    before = signal.signal(number, signal.SIG_DFL)  # even where the tests run under nohup
    runner = Runner(tmp_path, task("ppo-trainer", "echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 300"))
    signal.signal(number, before)
    pid = int(runner.wait_for("pid").read_text())
    runner.send(number)
    assert runner.end().exit_code == 128 + number
    assert not is_running(pid)


def test_under_nohup_a_run_outlives_a_hang_up(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a program
    runner = Runner(tmp_path, task("ppo-trainer", "touch started; until [ -e go ]; do sleep 0.1; done"))
    signal.signal(signal.SIGHUP, before)
    runner.wait_for("started")
    runner.send(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert runner.end().exit_code == 0


def test_a_second_ctrl_c_waits_for_nothing(tmp_path):
    command = "trap 'touch asked' TERM; touch started; while :; do sleep 0.1; done"
    runner = Runner(tmp_path, task("ppo-trainer", command), stop_seconds=3600)
    runner.wait_for("started")
    runner.send(signal.SIGINT)
    runner.wait_for("asked")
    runner.send(signal.SIGINT)
    ended = runner.end()
    assert ended.exit_code == 130
    assert "ppo-trainer running, asked to stop; Ctrl-C again ends it at once" in ended.output


def test_processes_in_sessions_of_their_own_end_too(tmp_path):
    (tmp_path / "detach.py").write_text(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\n"
    )
    ended = run(tmp_path, task("ppo-trainer", "python detach.py"))
    assert ended.exit_code == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_ctrl_c_lets_the_trainer_write_a_checkpoint_while_the_services_still_serve(tmp_path):
    runner = Runner(
        tmp_path,
        task(
            "ppo-trainer",
            "trap 'kill -0 $(cat server) && sleep 1 && kill -0 $(cat server) && touch checkpoint; exit 0' TERM\n"
            "until [ -e server ]; do sleep 0.01; done; touch started; while :; do sleep 0.05; done",
        ),
        task("replay-buffer", "echo $$ > server.tmp; mv server.tmp server; exec sleep 300"),
    )
    runner.wait_for("started")
    runner.send(signal.SIGINT)
    assert runner.end().exit_code == 130
    assert (tmp_path / "checkpoint").exists()


def test_a_killed_runner_leaves_no_process_behind(tmp_path):
    runner = Runner(tmp_path, task("ppo-trainer", "echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 300"))
    pid = int(runner.wait_for("pid").read_text())
    runner.send(signal.SIGKILL)
    runner.process.wait()
    wait_until(lambda: not is_running(pid), "the end of the trainer")


def test_a_run_is_running_while_it_is_resumed_and_has_ended_when_its_runner_was_killed(tmp_path):
    first = run(tmp_path, DONE)
    assert state_of(first.run_dir) == "succeeded"
    runner = Runner(tmp_path, task("ppo-trainer", "touch resumed; exec sleep 300"))
    runner.wait_for("resumed")
    assert state_of(runner.run_dir) == "running"
    runner.send(signal.SIGKILL)
    runner.process.wait()
    assert state_of(runner.run_dir) == "ended without a summary"


@pytest.mark.parametrize(
    ("command", "number", "state"),
    [("touch started; exit 3", None, "failed"), ("touch started; exec sleep 300", signal.SIGINT, "interrupted")],
)
def test_a_run_without_a_summary_has_the_outcome_that_its_runner_saw(tmp_path, command, number, state):
    runner = Runner(tmp_path, task("ppo-trainer", command))
    if number is not None:
        runner.wait_for("started")
        runner.send(number)
    assert state_of(runner.end().run_dir) == state


@pytest.mark.parametrize(("code", "reason"), [(0, "No space left on device"), (7, "File exists")])
def test_a_run_whose_logs_and_record_cannot_be_written_goes_on_and_ends_as_it_would(tmp_path, code, reason):
    (tmp_path / "runs/test/runner.json").mkdir(parents=True)
    logs = tmp_path / "runs/test/logs"
    if code:
        logs.touch()
    else:
        # Not for a node that fails: the end of its log is shown, and this one has no end.
        logs.mkdir()
        for name in ("ppo-trainer-0.log", "reward-server-0.log"):
            (logs / name).symlink_to("/dev/full")
    ended = run(
        tmp_path, task("ppo-trainer", f"echo x; touch ran; exit {code}"), task("reward-server", "exec sleep 60")
    )
    assert ended.exit_code == code, ended.output
    assert (tmp_path / "ran").exists()
    assert len(re.findall(f"its logs cannot be written: .*{reason}", ended.output)) == 1, ended.output
    assert "the run's record cannot be written" in ended.output


def test_a_run_whose_own_output_cannot_be_written_goes_on_and_ends_as_it_would(tmp_path):
    (tmp_path / "group.yaml").write_text(HEADER + task("ppo-trainer", "touch ran; exit 7"))
    command = [sys.executable, "-m", "scripts.grpo", "run", "group.yaml", "--run-id", "test"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=200, check=False)
    assert ended.returncode == 7
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("directory", "told"),
    [("nodes.json", "cannot be written"), ("runner.lock", "cannot be locked"), ("", "cannot be made")],
)
def test_a_run_does_not_start_where_its_directory_cannot_be_written(tmp_path, directory, told):
    if directory:
        (tmp_path / "runs/test" / directory).mkdir(parents=True)
    else:
        (tmp_path / "runs").touch()
    ended = run(tmp_path, task("ppo-trainer", "touch started"))
    assert ended.exit_code == 78
    assert told in ended.output
    assert "Traceback" not in ended.output
    assert not (tmp_path / "started").exists()


def test_a_run_that_goes_on_is_not_started_twice(tmp_path):
    runner = Runner(tmp_path, task("ppo-trainer", "touch started; exec sleep 300"))
    runner.wait_for("started")
    second = run(tmp_path, DONE)
    assert second.exit_code == 78
    assert "already running" in second.output
    runner.send(signal.SIGTERM)
    assert runner.end().exit_code == 143


def test_options_reach_the_tasks(tmp_path):
    ended = run(
        tmp_path,
        task(
            "ppo-trainer",
            "echo $MODEL_NAME $NEW $KEY $SKYPILOT_NUM_NODES",
            envs={"MODEL_NAME": None, "NEW": ""},
            secrets={"KEY": ""},
        ),
        arguments=("--env", "MODEL_NAME=m", "--env", "NEW=n", "--secret", "KEY=k", "--num-nodes", "ppo-trainer=2"),
    )
    assert ended.log("ppo-trainer", 1).splitlines()[1:] == ["m n k 2"]


def test_a_run_starts_only_with_a_sound_file_and_options(tmp_path):
    needs = task("ppo-trainer", "touch ran", envs={"MODEL_NAME": None})
    ended = run(tmp_path, needs)
    assert ended.exit_code == 78
    assert "task ppo-trainer needs ['MODEL_NAME']; give --env MODEL_NAME=VALUE" in ended.output.replace("\n", "")
    assert not (tmp_path / "ran").exists()


SERVER = """
import http.server, json, os, sys

task, port, reply = sys.argv[1:]
host, port = json.loads(os.environ["JOBGROUP_ENDPOINTS"])[f"{task}-0:{port}"].split(":")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply.encode())
        open("asked" + self.path.replace("/", "-"), "w")


http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


def test_steps_are_printed_as_they_end(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    command = """
        python server.py ppo-trainer 8004 '{"phase": "train", "step": 0, "total_steps": 3, "activity": {
          "what": "training step 1", "done": "", "since": 1, "until": null}}' &
        until [ -e asked-stats ]; do sleep 0.01; done
        for step in 1 2 3; do
          echo '{"step": '$step', "reward_mean": 0.'$step', "loss": 0.01, "seconds_generate": 1.5}' \\
            >> $SHARED_DIR/runs/$RUN_ID/metrics.jsonl
          until grep -q "step $step" $OUTPUT; do sleep 0.05; done
        done
        echo '{"status": "succeeded", "steps": 3, "reward_first": 0.1, "reward_last": 0.3}' \\
          > $SHARED_DIR/runs/$RUN_ID/summary.json
    """
    ended = run(
        tmp_path,
        task("ppo-trainer", command, envs={"SHARED_DIR": "/shared", "OUTPUT": OUTPUT}, volumes={"/shared": "volume"}),
        arguments=("--plain",),
    )
    assert ended.exit_code == 0, ended.output
    assert "step 2/3  reward 0.200  loss +0.0100  generate 1.5s" in ended.output
    assert "left" in ended.output
    assert "0.100 → 0.300" in ended.output


TRAINS = """
echo x >> starts; cd runs/$RUN_ID; mkdir -p model
echo '{"status": "succeeded", "steps": '$MAX_STEPS', "reward_first": 0.1, "reward_last": 0.3}' > summary.json
echo '{"components": {"ppo-trainer": {"settings": {"max_steps": '$MAX_STEPS', "num_epochs": 3, "batch_size": 4,
"target_accuracy": null}}}}' > config.json
"""


@pytest.mark.parametrize(("given", "starts"), [((), 1), (("--env", "NUM_EPOCHS=6"), 2), (("--env", "MAX_STEPS=9"), 2)])
def test_a_run_that_has_ended_starts_nothing_until_it_has_further_steps(tmp_path, given, starts):
    arguments = ("--env", "MAX_STEPS=2")
    first = run(tmp_path, task("ppo-trainer", TRAINS), arguments=arguments)
    assert first.exit_code == 0
    assert "nothing is left" not in first.output
    again = run(tmp_path, task("ppo-trainer", TRAINS), arguments=(*arguments, *given))
    assert again.exit_code == 0, again.output
    assert (tmp_path / "starts").read_text().split() == ["x"] * starts
    told = "nothing is left to do: run test has ended after step 2; to train on, raise MAX_STEPS or NUM_EPOCHS"
    assert (told in again.output) == (starts == 1)
    assert "0.100 → 0.300" in again.output
    assert state_of(first.run_dir) == "succeeded"


def test_the_end_of_a_failed_components_log_is_shown(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "echo the reason; exit 3"))
    assert "the reason" in ended.output


def test_only_the_error_is_shown_of_a_component_that_names_one(tmp_path):
    command = "echo chatter; echo 'error: DATASET x cannot be had' >&2; echo more chatter; exit 78"
    ended = run(tmp_path, task("ppo-trainer", command, num_nodes=2))
    assert ended.output.count("DATASET x cannot be had") == 1
    assert "chatter" not in ended.output


@pytest.mark.parametrize("hosts", ["--own-hosts", "--shared-host"])
def test_the_runner_prints_when_a_component_is_up(tmp_path, hosts):
    (tmp_path / "server.py").write_text(SERVER)
    ended = run(
        tmp_path,
        task("ppo-trainer", f"until grep -q 'reward-server-0 up' {OUTPUT}; do sleep 0.05; done"),
        task("reward-server", "exec python server.py reward-server 8002 {}"),
        arguments=(hosts,),
    )
    assert ended.exit_code == 0, ended.output
    assert "reward-server-0 up" in ended.output


def test_the_runner_records_which_components_are_up(tmp_path):
    """``grpo status`` tells a component that starts from one that fell silent by this record."""
    (tmp_path / "server.py").write_text(SERVER)
    runner = Runner(
        tmp_path,
        task("ppo-trainer", "until [ -e over ]; do sleep 0.05; done"),
        task("reward-server", "exec python server.py reward-server 8002 {}"),
        task("data-server", "exec sleep 600"),
    )
    states = {"ppo-trainer-0": "running", "reward-server-0": "up", "data-server-0": "running"}

    def recorded():
        nodes = read_nodes(runner.run_dir)
        return nodes is not None and nodes.states == states

    wait_until(recorded, "the states", progress=lambda: bytes_in(tmp_path))
    (tmp_path / "over").touch()
    assert runner.end().exit_code == 0


def test_a_dry_run_shows_what_would_run_and_runs_nothing(tmp_path):
    ended = run(tmp_path, task("ppo-trainer", "touch ran", num_nodes=2), arguments=("--dry-run", "--commands"))
    assert ended.exit_code == 0
    assert "ppo-trainer-1" in ended.output
    assert "touch ran" in ended.output
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "runs").exists()
