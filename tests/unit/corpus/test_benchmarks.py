"""Benchmark sets from files in their released formats: what the model is asked, and what is left out."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.config.suites import BenchmarkSet, read_suite
from dspark.corpus.benchmarks import benchmark_files, read_benchmark
from dspark.errors import DataError, PreflightError, SettingsError

CHECKOUT = Path(__file__).resolve().parents[3]
DATA = CHECKOUT / "tests" / "data" / "suites"
SUFFIX = "\n\nWork through it step by step and end with the result in \\boxed{}."
FENCE = "```"


@pytest.fixture(scope="module")
def paper() -> dict[str, BenchmarkSet]:
    return {one.name: one for one in read_suite(CHECKOUT, "paper").sets}


def asked(spec: BenchmarkSet, data: Path = DATA) -> dict[str, str]:
    return {prompt.id: prompt.messages[0].content for prompt in read_benchmark(spec, data).prompts}


def test_the_paper_s_nine_sets_stand_in_its_order_with_deepspec_s_sizes(paper: dict[str, BenchmarkSet]):
    """deepspec.md, 5.3: rows that were released, and how many are asked; temperature 1 and 2048 tokens."""
    sizes = {name: (one.group, one.rows, one.limit) for name, one in paper.items()}
    assert sizes == {
        "gsm8k": ("math", 1319, 500),
        "math500": ("math", 500, 500),
        "aime25": ("math", 30, 30),
        "mbpp": ("code", 257, 256),
        "humaneval": ("code", 164, 164),
        "livecodebench": ("code", 1055, 500),
        "mt-bench": ("chat", 80, 80),
        "alpaca": ("chat", 52002, 500),
        "arena-hard": ("chat", 750, 500),
    }
    suite = read_suite(CHECKOUT, "paper")
    assert (suite.temperatures, suite.max_new_tokens) == ((1.0,), 2048)
    assert all(one.licence and one.origin for one in suite.sets)


EXPECTED = {
    "gsm8k": ["A crate holds 12 jars. How many jars do 7 crates hold?" + SUFFIX,
              "Tom reads {problem} pages on each of 3 days. Is the text in braces a number?" + SUFFIX,
              "A crate holds 12 jars.  How many jars do 7 crates hold?" + SUFFIX],
    "math500": ["Find $x$ if $3x + 5 = 20$." + SUFFIX, "What is $\\binom{6}{2}$?" + SUFFIX],
    "aime25": ["Find the number of integers $n$ with $1 \\le n \\le 999$ that 7 divides." + SUFFIX,
               "Find the remainder when $2^{100}$ is divided by $7$." + SUFFIX],
    "mbpp": ["Write a function to halve a number.", "Write a function to count the dots in a string."],
    "livecodebench": [
        "Solve this programming problem in Python. Read the input from stdin and write the result to stdout.\n\n"
        "Print the sum of two integers.\n\nInput: a line with $a$ and $b$.\n\n"
        "Answer with the whole program in one code block.",
        "Solve this programming problem in Python.\n\n"
        "Return the length of the longest run of equal entries of nums.\n\n"
        "Complete this code and answer with all of it in one code block:\n\n"
        f"{FENCE}python\nclass Solution:\n    def longestRun(self, nums: List[int]) -> int:\n        \n{FENCE}",
    ],
    "mt-bench": ["Write a short letter to a neighbour about a fallen tree.",
                 "Three runners finish one after the other. Ann is not last and Ben is first. Who is second?"],
    "alpaca": ["Name the odd one out.\n\nplum, pear, hammer", "Give two reasons to walk to work."],
    "arena-hard": ["Write a shell script that renames every .jpeg file below a folder to .jpg.",
                   "Write the first paragraph of a story about a lighthouse."],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_set_asks_what_its_rows_say(paper: dict[str, BenchmarkSet], name: str):
    prompts = read_benchmark(paper[name], DATA).prompts
    assert [prompt.messages[0].content for prompt in prompts] == EXPECTED[name]


def test_rows_are_named_by_their_own_ids(paper: dict[str, BenchmarkSet]):
    assert list(asked(paper["math500"])) == ["math500/test/algebra/1.json", "math500/test/counting/2.json"]
    assert list(asked(paper["mbpp"])) == ["mbpp/11", "mbpp/510"]
    assert list(asked(paper["livecodebench"])) == ["livecodebench/abc000_a", "livecodebench/9001"]
    assert list(asked(paper["mt-bench"])) == ["mt-bench/81", "mt-bench/101"]
    assert len(asked(paper["gsm8k"])) == 3 - 1, "without ids the content names a row; white space is no content"
    assert list(asked(paper["arena-hard"])) == ["arena-hard/0a1b2c3d4e5f6071", "arena-hard/1a1b2c3d4e5f6071"]


def test_rows_outside_of_the_set_are_neither_kept_nor_rejected(paper: dict[str, BenchmarkSet]):
    reading = read_benchmark(paper["mbpp"], DATA)
    assert (len(reading.prompts), reading.rejections, reading.outside) == (2, [], 2)


def test_later_turns_are_left_out_and_counted(paper: dict[str, BenchmarkSet]):
    assert read_benchmark(paper["mt-bench"], DATA).turns_left_out == 2
    assert read_benchmark(paper["gsm8k"], DATA).turns_left_out == 0


def test_both_releases_of_arena_hard_are_known(paper: dict[str, BenchmarkSet], tmp_path: Path):
    """v0.1 holds a conversation of one turn where v2.0 holds a prompt."""
    row = {"question_id": "x1", "category": "c", "cluster": "k", "turns": [{"content": "Sort {prompt} by size."}]}
    (tmp_path / "arena-hard").mkdir()
    (tmp_path / "arena-hard/question.jsonl").write_text(json.dumps(row) + "\n")
    assert asked(paper["arena-hard"], tmp_path) == {"arena-hard/x1": "Sort {prompt} by size."}


@pytest.mark.parametrize("pack", ["parquet", "gz", "json"])
def test_the_same_rows_in_another_file_are_the_same_prompts(paper: dict[str, BenchmarkSet], tmp_path: Path, pack: str):
    lines = (DATA / "math500/test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    if pack == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set.parquet")
    elif pack == "gz":
        (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    else:
        (tmp_path / "set.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows).encode())
    other = paper["math500"].model_copy(update={"files": ("set.parquet", "set.jsonl.gz", "set.json")})
    assert asked(other, tmp_path) == asked(paper["math500"])


def test_the_first_pattern_that_fits_is_read_whole(paper: dict[str, BenchmarkSet], tmp_path: Path):
    assert [path.name for path in benchmark_files(paper["livecodebench"], DATA)] == ["test.jsonl", "test2.jsonl"]
    shutil.copy(DATA / "gsm8k/test.jsonl", tmp_path / "gsm8k.jsonl")
    assert [path.name for path in benchmark_files(paper["gsm8k"], tmp_path)] == ["gsm8k.jsonl"]


def test_a_set_that_is_not_there_is_refused_with_where_to_get_it(paper: dict[str, BenchmarkSet], tmp_path: Path):
    with pytest.raises(PreflightError, match=r"set 'aime25': none of aime25/\*\.parquet, .* is in ") as error:
        read_benchmark(paper["aime25"], tmp_path)
    assert error.value.hint.startswith("https://huggingface.co/datasets/MathArena/aime_2025")
    assert error.value.hint.endswith("licence: CC BY-NC-SA 4.0 (MathArena)")


BROKEN = {
    "set.json": (b'{"problem": 1}', "must be a list of rows, is an object"),
    "other.json": (b"[1, 2", "not valid JSON"),
    "set.jsonl.gz": (b"plain", "not a gzip file"),
    "cut.jsonl.gz": (gzip.compress(b'{"problem": "x"}' * 99)[:-9], "not a gzip file"),
    "set.parquet": (b"PAR1 and then nothing", "not a parquet file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_not_what_it_is_called_is_an_error(paper: dict[str, BenchmarkSet], tmp_path: Path, name: str):
    data, reason = BROKEN[name]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=reason):
        read_benchmark(paper["math500"].model_copy(update={"files": (name,)}), tmp_path)


def test_rows_that_cannot_be_asked_are_rejected_with_their_line(paper: dict[str, BenchmarkSet], tmp_path: Path):
    lines = [b'{"problem": "fine", "unique_id": "a"}', b"", b"{", b'{"problem": "  "}', b'{"problem": [3]}', b"[]",
             b'{"unique_id": 4, "answer": "x"}', b'{"problem": "\xff"}', b'{"problem": "a\\u0000b"}']  # fmt: skip
    (tmp_path / "set.jsonl").write_bytes(b"\r\n".join(lines))
    reading = read_benchmark(paper["math500"].model_copy(update={"files": ("set.jsonl",)}), tmp_path)
    assert [prompt.id for prompt in reading.prompts] == ["math500/a"]
    assert [(row.line, row.category) for row in reading.rejections] == [
        (3, "json"), (4, "shape"), (5, "content"), (6, "json"), (7, "shape"), (8, "encoding"), (9, "characters"),
    ]  # fmt: skip
    assert reading.rejections[1].reason == "problem: missing or empty"


def test_one_id_for_two_prompts_is_refused_across_files(paper: dict[str, BenchmarkSet], tmp_path: Path):
    for number, text in enumerate(("one", "two"), start=1):
        row = {"question_id": "same", "question_content": text, "starter_code": ""}
        (tmp_path / f"test{number}.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        DataError, match=r"test2\.jsonl:1: id 'livecodebench/same' already stands .* \(test1\.jsonl:1\)"
    ):
        read_benchmark(paper["livecodebench"].model_copy(update={"files": ("test*.jsonl",)}), tmp_path)


def test_what_no_prompt_names_is_never_looked_at(paper: dict[str, BenchmarkSet], tmp_path: Path):
    """LiveCodeBench's hidden tests are gigabytes: no trace of them is kept, whatever they hold."""
    row = json.loads((DATA / "livecodebench/test.jsonl").read_text())
    row |= {"private_test_cases": "x" * 4_000_000, "template": 5, "messages": "no conversation"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    spec = paper["livecodebench"].model_copy(update={"files": ("test.jsonl",)})
    assert list(asked(spec, tmp_path).values()) == EXPECTED["livecodebench"][:1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab {}\n\0ä", max_size=8) | st.floats(-9, 9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "content", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ["problem", "question", "prompt", "turns", "uid", "question_id", "task_id", "instruction", "input", "extra"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5), max_size=4),
    name=st.sampled_from(["math500", "mbpp", "mt-bench", "alpaca", "arena-hard"]),
)
def test_every_row_is_kept_rejected_or_outside_whatever_it_holds(paper, tmp_path, rows, name):
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = paper[name].model_copy(update={"files": ("set.jsonl",)})
    try:
        reading = read_benchmark(spec, tmp_path)
    except DataError as error:
        assert "already stands for another prompt" in error.message
        return
    assert len(reading.prompts) + len(reading.rejections) + reading.outside == len(rows)
    assert all(prompt.messages[0].content.strip() for prompt in reading.prompts)


VALID = {"name": "s", "group": "g", "title": "t", "licence": "l", "origin": "o", "rows": 1, "limit": 1,
         "files": ["a.jsonl"], "prompts": ["{q}"]}  # fmt: skip
MISTAKES = [
    ({"files": []}, "names either files or a domain"),
    ({"domain": "humaneval"}, "names either files or a domain"),
    ({"prompts": []}, "files need prompts"),
    ({"prompts": ["\\boxed{}"]}, "holds no {field}"),
    ({"files": ["../a.jsonl"]}, "leaves the folder of data"),
    ({"files": ["/etc/a.jsonl"]}, "leaves the folder of data"),
    ({"files": ["a.csv"]}, "is none of .jsonl"),
    ({"files": [], "prompts": [], "domain": "d", "id": ["x"]}, "are for files"),
    ({"prompt": "x"}, "unknown key 'sets.prompt'"),
]


@pytest.mark.parametrize("change, reason", MISTAKES)
def test_mistakes_in_a_suite_are_named(tmp_path: Path, change: dict[str, object], reason: str):
    folder = tmp_path / "pipeline/suites"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(json.dumps({"sets": [VALID | change]}))
    with pytest.raises(SettingsError) as error:
        read_suite(tmp_path, "mine")
    assert reason in error.value.message and "pipeline/suites/mine.yaml" in error.value.message


def test_an_unknown_suite_suggests_a_known_one():
    with pytest.raises(SettingsError, match="suite 'papre' does not exist") as error:
        read_suite(CHECKOUT, "papre")
    assert "did you mean 'paper'?" in error.value.hint


def test_two_sets_of_one_name_are_refused(tmp_path: Path):
    (tmp_path / "pipeline/suites").mkdir(parents=True)
    (tmp_path / "pipeline/suites/mine.yaml").write_text(json.dumps({"sets": [VALID, VALID]}))
    with pytest.raises(SettingsError, match="sets of one name: s"):
        read_suite(tmp_path, "mine")


def test_parquet_without_pyarrow_says_what_to_install(paper: dict[str, BenchmarkSet], tmp_path: Path):
    (tmp_path / "set.parquet").write_bytes(b"")
    declared = paper["math500"].model_dump(mode="json") | {"files": ["set.parquet"]}
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from dspark.config.suites import BenchmarkSet\n"
        "from dspark.corpus.benchmarks import read_benchmark\n"
        "from dspark.errors import PreflightError\n"
        f"spec = BenchmarkSet.model_validate({declared!r})\n"
        "try:\n    read_benchmark(spec, Path(sys.argv[1]))\n"
        "except PreflightError as error:\n    print(error.message, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "parquet needs pyarrow, which is not installed pip install 'dspark[pipeline]'" in done.stdout
