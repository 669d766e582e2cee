"""`dspark drift` and `dspark package smoke`, on a package and a server that speaks vLLM's protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # watched.py

import watched
from protocol_servers import serving
from watched import Canned, Server

from dspark.cli.boundary import run_command
from dspark.corpus.prompts import PreparedPrompt
from dspark.engines.client import Streamed
from dspark.engines.counters import of_histogram
from dspark.errors import ServiceError
from dspark.evaluation.smoke import Answered, judge_smoke
from dspark.workspace.smoke import within


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return watched.make(tmp_path_factory.mktemp("watched"))


def traffic(engine: Canned, requests: int = 60, **model) -> Server:
    """A server that has answered the recorded prompts over and over."""
    server = Server(engine, **model)
    for number in range(requests):
        server.seen += engine.run([1, 2 + number % 9], 0).accepted
    return server


def ask(capsys, *arguments):
    capsys.readouterr()
    code = run_command([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_server_like_the_certified_one_has_not_drifted(folder, capsys):
    with serving(traffic(Canned())) as url:
        code, found = ask(capsys, "drift", "--package", folder, "--metrics", f"{url}/metrics")
    assert (code, found["drift"]["verdict"], found["schema"]) == (0, "within", "dspark/drift/1")
    tau = found["drift"]["quantities"][0]
    assert tau["live"]["value"] == pytest.approx(1 + sum(map(sum, map(watched.accepted, range(9)))) / 9 / 15, abs=0.02)
    assert found["drift"]["window"] == {
        "kind": "since the server started", "requests": 60, "steps": 900, "tokens": tau_tokens(),
    }  # fmt: skip
    assert found["cause"] == {"kind": "none", "text": "nothing to explain", "fields": []}
    assert any("single prompts in the evidence" in line for line in found["drift"]["assumptions"])


def tau_tokens():
    return sum(sum(watched.accepted(number % 9)) + 16 for number in range(60))


def test_a_fallen_acceptance_ends_with_nine_and_is_laid_to_the_traffic(folder, capsys):
    with serving(traffic(Canned(missing=2))) as url:
        code, found = ask(capsys, "drift", "--package", folder, "--metrics", url)
        assert run_command(["drift", "--package", str(folder), "--metrics", url]) == 9
    assert (code, found["drift"]["verdict"], found["cause"]["kind"]) == (9, "drifted", "domain shift")
    assert found["drift"]["mixture"]["inside"] == "below"
    said = capsys.readouterr().out
    assert "drifted: the engine tells what was certified of it, so the traffic is of a domain" in said
    assert "is said to have drifted in 1% of checks, assuming:" in said


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"max_model_len": 400}, "context: certified 500, here 400"),
        ({"root": "org/another"}, "name of the target: certified tiny-llama, here another"),
    ],
)
def test_an_engine_that_is_another_is_suspected_by_field(folder, capsys, model, field):
    with serving(traffic(Canned(missing=2), **model)) as url:
        code, found = ask(capsys, "drift", "--package", folder, "--metrics", url)
    assert (code, found["cause"]["kind"], found["cause"]["fields"]) == (9, "engine change", [field])


def test_what_cannot_be_compared_ends_with_six(folder, capsys):
    with serving(traffic(Canned(verified=2))) as url:
        code, found = ask(capsys, "drift", "--package", folder, "--metrics", url)
    assert (code, found["drift"]["verdict"]) == (6, "not comparable")
    assert "2.00 of 3 drafts were verified" in found["drift"]["quantities"][0]["reason"]
    assert found["cause"] == {"kind": "none", "text": found["drift"]["quantities"][0]["reason"], "fields": []}
    with serving(traffic(Canned())) as url:
        assert ask(capsys, "drift", "--package", folder, "--metrics", url, "--profile", "gpu-elsewhere")[0] == 6


def test_a_server_that_is_not_there_ends_with_eight(folder, capsys):
    code, found = ask(capsys, "drift", "--package", folder, "--metrics", "http://127.0.0.1:9")
    assert code == 8 and "--enable-metrics" in found["hint"]


def test_saved_scrapes_make_a_window_and_say_nothing_of_the_engine(folder, capsys, tmp_path):
    """Of 200 requests the last 100 accept nothing: a scrape in between tells these from the whole."""
    server = traffic(Canned(), 100)
    (tmp_path / "before").write_text(server.metrics())
    server.seen += traffic(Canned(missing=3), 100).seen
    (tmp_path / "after").write_text(server.metrics())
    arguments = ("drift", "--package", folder, "--metrics", tmp_path / "after", "--since", tmp_path / "before")
    code, found = ask(capsys, *arguments)
    assert (code, found["cause"]["kind"], found["drift"]["window"]["kind"]) == (9, "unknown", "between two scrapes")
    assert found["drift"]["quantities"][0]["live"]["value"] == 1.0 and found["drift"]["window"]["requests"] == 100
    code, found = ask(capsys, *arguments[:-2], "--since", tmp_path / "after")
    assert (code, found["drift"]["window"]["steps"]) == (6, 0)
    code, found = ask(capsys, "drift", "--package", folder, "--metrics", tmp_path / "before", "--since", arguments[4])
    assert (code, found["drift"]["window"]["kind"]) == (0, "since a restart between the scrapes")


def test_two_scrapes_of_a_server_make_a_window(folder, capsys):
    with serving(traffic(Canned())) as url:
        code, found = ask(capsys, "drift", "--package", folder, "--metrics", url, "--seconds", "0.05")
        assert (code, found["drift"]["window"]["steps"]) == (6, 0) and found["drift"]["window"]["seconds"] >= 0
    assert ask(capsys, "drift", "--package", folder, "--metrics", "file", "--seconds", "1")[0] == 2
    both = ("--seconds", "1", "--since", "x")
    assert ask(capsys, "drift", "--package", folder, "--metrics", "http://127.0.0.1:9", *both)[0] == 2


def test_a_changed_file_of_the_evidence_is_refused(folder, capsys, tmp_path):
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    path = changed / "evidence/evaluate/records/temperature-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with serving(traffic(Canned())) as url:
        assert ask(capsys, "drift", "--package", changed, "--metrics", url)[0] == 7
        assert ask(capsys, "package", "smoke", url, "--package", changed)[0] == 7


def test_an_expired_certificate_is_said(tmp_path, capsys):
    end = watched.HoldsUntil(engine_version="vLLM 0.32.0", date="2020-07-01")
    package = watched.make(tmp_path, recorded=False, holds_until=end, measured_at="2020-01-01T00:00:00+00:00")
    with serving(traffic(Canned())) as url:
        code, found = ask(capsys, "drift", "--package", package, "--metrics", url)
    assert (code, found["expired"]) == (0, "2020-07-01")
    assert any("the certificate's intervals" in line for line in found["drift"]["assumptions"])


# ---------------------------------------------------------------- smoke


def test_a_healthy_server_ends_with_zero(folder, capsys):
    server = Server(Canned())
    with serving(server) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", folder)
    smoke = found["smoke"]
    assert (code, smoke["verdict"], smoke["prompts"], smoke["compared_with"]) == (0, "healthy", 20, "records")
    assert smoke["tau"]["relative_difference"]["value"] == 0 and smoke["tau"]["result"] == "agrees"
    assert smoke["between_tokens"]["certified_seconds"] == pytest.approx(0.1)
    assert [one["max_tokens"] for one in server.engine.requests] == [16] * 25  # 20 are counted, 5 are timed


def test_a_server_that_drafts_something_else_ends_with_nine(folder, capsys):
    with serving(Server(Canned(missing=1))) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", folder, "--prompts", 8)
        assert run_command(["package", "smoke", url, "--package", str(folder)]) == 9
    assert (code, found["smoke"]["verdict"], found["smoke"]["prompts"]) == (9, "unhealthy", 8)
    assert "surely lower by more than 5.0%" in found["smoke"]["reasons"][0]
    assert "unhealthy: tau is " in capsys.readouterr().out


def streamed(first: float, gap: float) -> Streamed:
    return Streamed(tuple(range(21)), tuple(first + gap * number for number in range(21)), first + gap * 20)


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        ([streamed(3.9, 0.19)] * 3, []),
        # A single slow reply is no slow server.
        ([streamed(1.0, 0.1)] * 3 + [streamed(50.0, 9.0)] * 2, []),
        ([streamed(4.1, 0.1)] * 3, ["the time to the first token is 4.1 s, more than 2 times the certified 2 s"]),
        ([streamed(1.0, 0.21)] * 3, ["the time from token to token is 0.21 s, more than 2 times the certified 0.1 s"]),
    ],
)
def test_twice_the_certified_time_is_too_slow(streams, said):
    """Certified are 2 s to the slow first tokens and 0.1 s a token."""
    prompts = [
        PreparedPrompt(id=f"math/{number}", domain="math", messages=[{"role": "user"}], token_ids=[1, 2 + number])
        for number in range(9)
    ]
    counts = [Canned().run([1, 2 + number], 0).accepted for number in range(9)]
    counters = tuple(of_histogram(Canned().histogram(one), 3 * watched.STEPS) for one in counts)
    answered = Answered(counters, False, tuple(streams))
    found = judge_smoke(answered, prompts, watched.entry(), 3, engine="vllm", records=watched.records())
    assert list(found.reasons) == said and found.verdict == ("unhealthy" if said else "healthy")


def test_times_of_more_than_one_request_are_not_compared():
    entry = watched.entry(load=tuple(one for one in watched.entry().load if one.concurrency == 4))
    answered = Answered((of_histogram([6, 4, 3, 2], 45),), False, (streamed(9.0, 9.0),))
    prompt = PreparedPrompt(id="math/0", domain="math", messages=[{"role": "user"}], token_ids=[1, 2])
    found = judge_smoke(answered, [prompt], entry, 3, engine="vllm", records=watched.records())
    assert found.verdict == "healthy" and found.absent["first_token"] == "no load of one request was certified"


@pytest.mark.parametrize("engine", [Canned(verified=2), Canned(off=True)])
def test_a_server_that_does_not_speculate_as_certified_ends_with_six(folder, capsys, engine):
    with serving(Server(engine)) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", folder)
    assert (code, found["smoke"]["verdict"]) == (6, "not comparable")


def test_a_server_for_shorter_requests_ends_with_six(folder, capsys):
    with serving(Server(Canned(), max_model_len=10)) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", folder)
    assert code == 6 and "started for shorter requests" in found["error"]


def test_without_records_prompts_are_compared_with_their_domains(tmp_path, capsys):
    package = watched.make(tmp_path, recorded=False)
    with serving(Server(Canned())) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", package)
    # math is certified with 2, chat with 1.5, of code there is the tau of all.
    assert found["smoke"]["compared_with"] == "domains" and code == 0
    assert found["smoke"]["tau"]["offline_tau"]["value"] == pytest.approx((7 * 2 + 7 * 1.5 + 6 * 2.03) / 20)


def test_a_probe_ends_in_time_whatever_a_server_does(folder, capsys):
    class Hanging(Server):
        def post(self, path, body):
            time.sleep(0.5)
            return super().post(path, body)

    begin = time.monotonic()
    with serving(Hanging(Canned())) as url:
        code, found = ask(capsys, "package", "smoke", url, "--package", folder, "--timeout", "0.3")
    assert code == 8 and ("within 0.3 s" in found["error"] or "timed out" in found["error"])
    assert time.monotonic() - begin < 5
    with pytest.raises(ServiceError, match=r"within 0.05 s"):
        within(0.05, "x", lambda: time.sleep(1))
    assert within(5, "x", lambda: 7) == 7


def test_neither_loads_what_a_serving_machine_lacks():
    script = (
        "import sys; import dspark.workspace.drift, dspark.workspace.smoke, dspark.engines.connect; "
        "import dspark.package.verify; "
        "print(sorted({'torch', 'transformers', 'mlflow', 'dvc', 'onnx', 'onnxruntime', 'scipy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
