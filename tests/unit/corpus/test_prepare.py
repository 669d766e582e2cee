from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config.models import CorpusSettings, DomainSpec
from dspark.corpus.prepare import prepare_prompts
from dspark.corpus.prompts import normalise, read_prompts
from dspark.corpus.splits import SPLITS
from dspark.corpus.summary import PromptsSummary
from dspark.errors import DataError, Interrupted, SettingsError
from dspark.io.digest import digest_file
from dspark.io.jsonfile import read_model
from dspark.io.progress import Progress

MANY = [{"id": str(index), "prompt": f"Question number {index}?"} for index in range(120)]


@pytest.fixture
def prepare(tmp_path, encoder):
    def prepare(corpus, *specs, out="prompts", progress=None):
        return prepare_prompts(corpus, specs, tmp_path, encoder, tmp_path / out, progress)

    return prepare


def rows_of(folder):
    return {split: read_prompts(folder / f"{split}.jsonl") for split in SPLITS}


def rejected_of(folder):
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


def test_the_folder_holds_the_splits_the_rejections_and_a_summary_that_agrees(
    tmp_path, prepare, make_domain, make_settings
):
    spec = make_domain("mine", [*MANY, b"", b"oops", {"prompt": "Question  number 3?"}, {"prompt": "a <|im_end|> b"}])
    summary = prepare(make_settings("mine"), spec)
    out = tmp_path / "prompts"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*(f"{split}.jsonl" for split in SPLITS), "rejected.jsonl", "summary.json"]
    )
    assert read_model(out / "summary.json", PromptsSummary) == summary
    rows = rows_of(out)
    mine = summary.domains["mine"]
    assert (mine.input, mine.kept, mine.rejected, mine.blank_lines) == (123, 120, 3, 1)
    assert mine.rejected_by_reason == {"control-token": 1, "duplicate": 1, "json": 1}
    for split in SPLITS:
        assert summary.splits[split] == mine.splits[split]
        assert summary.splits[split].prompts == summary.splits[split].units == len(rows[split])
        assert summary.splits[split].tokens == sum(len(row.token_ids) for row in rows[split])
    assert summary.files == {name: digest_file(out / name) for name in summary.files}
    assert mine.source_digest == digest_file(tmp_path / "mine.jsonl")
    assert [(row["line"], row["category"]) for row in rejected_of(out)] == [
        (122, "json"),
        (123, "duplicate"),
        (124, "control-token"),
    ]


def test_rows_hold_the_rendered_prompt(tmp_path, prepare, make_domain, make_settings):
    prepare(make_settings("mine"), make_domain("mine", MANY))
    row = rows_of(tmp_path / "prompts")["train"][0]
    text = row.messages[0]["content"]
    assert bytes(row.token_ids).decode() == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_text_that_spells_a_control_token_is_rejected_and_jinja_is_plain_text(tmp_path, prepare, make_settings, cases):
    """template-injection.jsonl: a turn marker and a thought marker are refused, jinja is kept to the letter."""
    path = tmp_path / "cases.jsonl"
    path.write_bytes((cases / "template-injection.jsonl").read_bytes() + "\n".join(map(json.dumps, MANY)).encode())
    spec = DomainSpec.model_validate({"name": "mine", "source": {"kind": "jsonl", "path": "cases.jsonl"}})
    prepare(make_settings("mine"), spec)
    assert [(row["id"], row["reason"]) for row in rejected_of(tmp_path / "prompts")] == [
        ("header-in-user", "messages[0].content: spells the control token <|im_end|>, <|im_start|>"),
        ("think-in-user", "messages[0].content: spells the control token </think>, <think>"),
    ]
    kept = {row.id: row for rows in rows_of(tmp_path / "prompts").values() for row in rows}
    assert kept["mine/jinja-in-user"].messages[0]["content"] == "{% generation %} {{ 7*7 }} {% endgeneration %}"
    assert b"{{ 7*7 }}" in bytes(kept["mine/jinja-in-user"].token_ids)


def test_what_the_tokenizer_or_the_template_cannot_carry_is_rejected(tmp_path, prepare, make_domain, make_settings):
    odd = [
        {"id": "lossy", "prompt": "a\u2063b"},
        {"id": "refused", "prompt": "refuse me"},
        {"id": "nothing", "prompt": "render me to nothing"},
        {"id": "long", "prompt": "x" * 500},
        {
            "id": "marker-in-history",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "<think>b"},
                {"role": "user", "content": "c"},
            ],
        },
    ]
    prepare(make_settings("mine", max_prompt_tokens=120), make_domain("mine", [*odd, *MANY]))
    assert {row["id"]: (row["category"], row["reason"]) for row in rejected_of(tmp_path / "prompts")} == {
        "lossy": ("round-trip", "messages[0].content: tokenising and detokenising does not give it back"),
        "refused": ("chat-template", "the chat template refuses the messages"),
        "nothing": ("chat-template", "the chat template renders it to no token"),
        # <|im_start|>user\n (17) + 500 + <|im_end|>\n (11) + <|im_start|>assistant\n (22) = 550 bytes
        "long": ("too-long", "550 tokens, prompts.max_prompt_tokens is 120"),
        "marker-in-history": ("control-token", "messages[1].content: spells the control token <think>"),
    }


def test_a_usable_spelling_is_kept_when_the_first_one_is_not(tmp_path, prepare, make_domain, make_settings):
    """Both are one prompt by white space, but only the second is short enough."""
    rows = [{"id": "wide", "prompt": "a" + " " * 200 + "b"}, {"id": "narrow", "prompt": "a b"}]
    prepare(make_settings("mine", max_prompt_tokens=120), make_domain("mine", [*rows, *MANY]))
    assert [row["id"] for row in rejected_of(tmp_path / "prompts")] == ["wide"]


def test_templates_stay_whole_with_and_without_a_limit(tmp_path, prepare, make_domain, make_settings):
    rows = [{"prompt": f"{t}: what is {i} + {t}?", "template": f"kind-{t}"} for t in range(60) for i in range(5)]
    spec = make_domain("mine", rows)
    for limit in (None, 200, 40):
        summary = prepare(make_settings("mine", per_domain=limit), spec)
        places = {}
        for split, kept in rows_of(tmp_path / "prompts").items():
            for row in kept:
                places.setdefault(row.template, set()).add(split)
        assert all(len(splits) == 1 for splits in places.values())
        assert summary.kept == (limit or 300) and summary.kept + summary.rejected == 300


def test_a_limit_keeps_the_shares_and_the_choice_of_smaller_limits(tmp_path, prepare, make_domain, make_settings):
    spec = make_domain("mine", [{"prompt": f"Question {index}?"} for index in range(1000)])
    full = prepare(make_settings("mine"), spec).splits
    ids = {}
    for limit in (500, 100):
        summary = prepare(make_settings("mine", per_domain=limit), spec)
        assert summary.domains["mine"].rejected_by_reason == {"per-domain": 1000 - limit}
        for split in SPLITS:
            assert abs(summary.splits[split].prompts - full[split].prompts * limit / 1000) <= 1
        ids[limit] = {row.id for rows in rows_of(tmp_path / "prompts").values() for row in rows}
    assert ids[100] < ids[500]


def test_adding_prompts_or_a_domain_moves_no_prompt_to_another_split(tmp_path, prepare, make_domain, make_settings):
    def places(folder):
        return {row.id: split for split, rows in rows_of(tmp_path / folder).items() for row in rows}

    prepare(make_settings("mine"), make_domain("mine", MANY), out="before")
    more = [{"id": f"new-{index}", "prompt": f"Something new {index}"} for index in range(80)]
    first = make_domain("mine", [*more, *reversed(MANY)])
    prepare(make_settings("other", "mine"), first, make_domain("other", more[:40]), out="after")
    before, after = places("before"), places("after")
    assert before.items() <= after.items()


def test_a_domain_that_comes_last_leaves_every_row_of_the_others_whatever_it_shares_with_them(
    tmp_path, prepare, make_domain, make_settings
):
    """What retraining rests on: same rows in the same order, so the same responses and the same features."""
    old = [*MANY, {"id": "t", "template": "t", "prompt": "From a template"}]
    mine, bench = make_domain("mine", old), make_domain("bench", [{"prompt": "Only ever evaluated"}])
    prepare(make_settings("mine", evaluation=["bench"], per_domain=90), mine, bench, out="before")
    shared = [*old[:50], {"prompt": "From a template"}, {"prompt": "Only ever evaluated"}]
    new = make_domain("new", [*({"prompt": f"Something new {index}"} for index in range(60)), *shared])
    prepare(make_settings("mine", "new", evaluation=["bench"], per_domain=90), mine, bench, new, out="after")
    before, after = rows_of(tmp_path / "before"), rows_of(tmp_path / "after")
    for split in SPLITS:
        assert [row for row in after[split] if row.domain != "new"] == before[split]
    kept = [row for rows in after.values() for row in rows if row.domain == "new"]
    assert len(kept) == 60


def test_a_conversation_and_its_beginning_stand_in_one_split(tmp_path, prepare, make_domain, make_settings):
    rows = []
    for index in range(60):
        turns = [
            {"role": "user", "content": f"Topic {index}?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Go on."},
        ]
        rows += [{"id": f"{index}-a", "messages": turns[:1]}, {"id": f"{index}-b", "messages": turns}]
    prepare(make_settings("mine"), make_domain("mine", rows))
    places = {row.id: split for split, kept in rows_of(tmp_path / "prompts").items() for row in kept}
    assert len(places) == 120
    assert all(places[f"mine/{index}-a"] == places[f"mine/{index}-b"] for index in range(60))


def test_one_first_turn_under_two_templates_is_not_divided(tmp_path, prepare, make_domain, make_settings):
    """Two templates may fall into two splits; the second prompt that begins alike is rejected instead."""
    turns = [
        {"role": "user", "content": "Same beginning"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    rows = [{"id": "a", "template": "t1", "messages": turns[:1]}, {"id": "b", "template": "t2", "messages": turns}]
    prepare(make_settings("mine"), make_domain("mine", [*rows, *MANY]))
    (row,) = rejected_of(tmp_path / "prompts")
    assert (row["id"], row["category"]) == ("b", "template")
    assert "begins as mine/a (mine.jsonl:1)" in row["reason"]


def test_evaluation_domains_stand_in_eval_alone_and_are_not_trained_on_elsewhere(
    tmp_path, prepare, make_domain, make_settings
):
    bench = make_domain("bench", [{"id": "1", "prompt": "Sort a list."}, {"id": "2", "prompt": "Add two numbers."}])
    longer = [
        {"role": "user", "content": "add  two numbers."},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and three?"},
    ]
    mine = make_domain("mine", [{"id": "x", "prompt": "Sort a  list."}, {"id": "y", "messages": longer}, *MANY])
    summary = prepare(make_settings("mine", evaluation=["bench"]), mine, bench)
    rows = rows_of(tmp_path / "prompts")
    assert {row.id for row in rows["eval"] if row.domain == "bench"} == {"bench/1", "bench/2"}
    assert not any(row.domain == "bench" for split in SPLITS[:-1] for row in rows[split])
    assert {row["id"]: row["reason"] for row in rejected_of(tmp_path / "prompts")} == {
        "x": "duplicate of bench/1 (bench.jsonl:1)",
        "y": "begins as bench/2, which is only evaluated",
    }
    assert summary.domains["bench"].evaluation_only and not summary.domains["mine"].evaluation_only


def test_duplicates_across_domains_are_merged_into_the_first(tmp_path, prepare, make_domain, make_settings):
    one, two = (
        make_domain("one", MANY),
        make_domain(
            "two", [{"id": "z", "prompt": "Question number 7?"}, *({"prompt": f"Other {i}"} for i in range(90))]
        ),
    )
    prepare(make_settings("one", "two"), two, one)
    assert [(row["domain"], row["id"], row["reason"]) for row in rejected_of(tmp_path / "prompts")] == [
        ("two", "z", "duplicate of one/7 (one.jsonl:8)")
    ]


def test_a_domain_with_nothing_in_train_is_an_error_that_says_what_was_rejected(
    tmp_path, prepare, make_domain, make_settings
):
    spec = make_domain("mine", [b"oops", {"messages": []}, {"prompt": "<think>"}])
    with pytest.raises(DataError, match=r"domain 'mine': none of its 0 usable prompts falls into train") as caught:
        prepare(make_settings("mine"), spec)
    assert "(rejected: 1 control-token, 1 json, 1 shape)" in caught.value.message
    assert not (tmp_path / "prompts").exists()
    # The template river-boat of a domain math lies in eval (test_splits.py), and nothing else is there.
    with pytest.raises(DataError, match=r"'math': none of its 1 usable prompts .*\(rejected: none\)"):
        prepare(make_settings("math"), make_domain("math", [{"prompt": "x", "template": "river-boat"}]))


def test_an_evaluation_domain_without_a_usable_prompt_is_an_error(prepare, make_domain, make_settings):
    with pytest.raises(DataError, match="domain 'bench': no usable prompt to evaluate"):
        prepare(make_settings("mine", evaluation=["bench"]), make_domain("mine", MANY), make_domain("bench", [b"oops"]))


def test_a_split_that_stays_empty_is_a_warning_in_the_summary(prepare, make_domain, make_settings):
    class Notes(Progress):
        def __init__(self):
            self.notes = []

        def note(self, message):
            self.notes.append(message)

    notes = Notes()
    # The 120 of one domain fill every split, the one prompt of the other can be in train alone.
    small = make_domain("small", [{"prompt": "Just one"}])
    summary = prepare(make_settings("mine", "small"), make_domain("mine", MANY), small, progress=notes)
    assert (
        summary.warnings
        == notes.notes
        == [
            f"domain 'small' has no prompt in {split}: add prompts or templates"
            for split in ("dev", "calibration", "eval")
        ]
    )


def test_a_split_that_is_empty_over_all_domains_is_refused_before_anything_is_answered(
    tmp_path, prepare, make_domain, make_settings, encoder
):
    """A split of 6 % stays empty for n prompts with 0.94^n: under 1 % from n = 75 on, as 0.94^74 = 0.0103 shows."""
    one, two = make_domain("one", [*MANY[:4], b"oops"]), make_domain("two", [{"prompt": "Just one"}])
    with pytest.raises(DataError, match=r"corpus 'corpus': no prompt in dev over all domains") as caught:
        prepare(make_settings("one", "two"), one, two)
    assert "(one.jsonl: 4 kept, 1 rejected; two.jsonl: 1 kept, 0 rejected)" in caught.value.message
    assert "about 75 that begin differently" in caught.value.hint and "there are 5" in caught.value.hint
    assert not (tmp_path / "prompts").exists()
    # Overfitting on a handful of answers needs no more than those.
    prepare_prompts(make_settings("one", "two"), [one, two], tmp_path, encoder, tmp_path / "few", needed=["train"])


def test_a_limit_that_empties_a_split_is_named(prepare, make_domain, make_settings):
    with pytest.raises(DataError, match="no prompt in dev, calibration, eval") as caught:
        prepare(make_settings("mine", per_domain=1), make_domain("mine", MANY))
    assert "or raise prompts.per_domain (1)" in caught.value.hint


def test_prompts_of_an_evaluation_domain_are_enough_for_eval(prepare, make_domain, make_settings):
    shares = {"train": 0.4, "dev": 0.295, "calibration": 0.3, "eval": 0.005}
    settings = make_settings("mine", evaluation=["bench"], shares=shares)
    summary = prepare(settings, make_domain("mine", MANY[:20]), make_domain("bench", [{"prompt": "Why?"}]))
    assert summary.splits["eval"].prompts == 1


def test_what_became_of_the_rows_is_one_line(prepare, make_domain, make_settings):
    spec = make_domain("mine", [*MANY, b"oops", b"oops", {"prompt": "Question  number 3?"}])
    told = prepare(make_settings("mine"), spec).told("corpora/c/prompts")
    assert told == "120 prompts kept, 3 rejected: corpora/c/prompts/rejected.jsonl (2 json, 1 duplicate)"
    whole = prepare(make_settings("mine"), make_domain("mine", MANY), out="whole").told("corpora/c/prompts")
    assert whole == "120 prompts kept, none rejected"
    # Nothing is wrong with what a limit leaves out.
    fewer = prepare(make_settings("mine", per_domain=100), make_domain("mine", MANY), out="fewer").told("c")
    assert fewer == "100 prompts kept, 20 over prompts.per_domain, none rejected"


@pytest.mark.parametrize(
    ("domains", "evaluation", "reason"),
    [
        (["mine", "mine"], [], "mine is named twice"),
        (["mine"], ["mine"], "mine is named twice"),
        (["yours"], [], "yours does not exist"),
    ],
)
def test_a_domain_must_be_known_and_named_once(prepare, make_domain, make_settings, domains, evaluation, reason):
    with pytest.raises(SettingsError, match=reason):
        prepare(make_settings(*domains, evaluation=evaluation), make_domain("mine", MANY))


def test_the_same_inputs_give_the_same_bytes_and_another_seed_others(tmp_path, prepare, make_domain, make_settings):
    spec = make_domain("mine", MANY)
    first = prepare(make_settings("mine"), spec, out="first")
    assert prepare(make_settings("mine"), spec, out="second") == first
    assert prepare(make_settings("mine", seed=1), spec, out="third").digest != first.digest


def test_a_stop_leaves_the_old_folder_and_nothing_half_made(tmp_path, prepare, make_domain, make_settings):
    class Stop(Progress):
        def advance(self, count=1, **fields):
            raise Interrupted("stopped")

    spec = make_domain("mine", MANY)
    before = prepare(make_settings("mine"), spec)
    with pytest.raises(Interrupted):
        prepare(make_settings("mine", seed=1), spec, progress=Stop())
    assert read_model(tmp_path / "prompts" / "summary.json", PromptsSummary) == before
    (tmp_path / ".prompts.part").mkdir()  # as a kill leaves it
    (tmp_path / ".prompts.part" / "rubbish").touch()
    prepare(make_settings("mine", seed=1), spec)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.jsonl", "prompts"]


turns = st.lists(
    st.sampled_from(["Hi", "hi ", "Why?", "x" * 40, "<think>", "\u2063", "", "caf\u00e9", "cafe\u0301"]), max_size=4
)
jsonl_rows = st.one_of(
    st.builds(
        lambda texts, template, first: json.dumps(
            {"messages": [{"role": ("user", "assistant")[(i + first) % 2], "content": t} for i, t in enumerate(texts)]}
            | ({"template": template} if template else {})
        ).encode(),
        turns,
        st.sampled_from([None, None, "t1", "t2"]),
        st.sampled_from([0, 0, 0, 1]),
    ),
    st.sampled_from([b"", b"null", b"{", b'{"prompt": "\xff"}']),
)


@settings(max_examples=30)
@given(st.lists(jsonl_rows, max_size=12), st.lists(jsonl_rows, max_size=6), st.sampled_from([None, 1, 3, 10]))
def test_kept_and_rejected_are_the_input_and_no_unit_is_divided_whatever_the_rows(encoder, mine, bench, limit):
    """A row of each domain is always usable, so that a run is refused for a lack of prompts only by its limit."""
    corpus = CorpusSettings.model_validate(
        {
            "name": "c",
            "target": "t",
            "domains": ["mine", "other"],
            "evaluation_domains": ["bench"],
            "prompts": {"per_domain": limit, "max_prompt_tokens": 110},
        }
    )
    bench = [b'{"prompt": "Why?"}', *bench]
    mine = [b'{"prompt": "Question number 1?"}', b'{"prompt": "Question number 2?"}', *mine]
    other = [json.dumps(row).encode() for row in MANY]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        specs = []
        for domain, rows in {"mine": mine, "bench": bench, "other": other}.items():
            (folder / f"{domain}.jsonl").write_bytes(b"\n".join(rows) + b"\n")
            source = {"kind": "jsonl", "path": f"{domain}.jsonl"}
            specs.append(DomainSpec.model_validate({"name": domain, "source": source}))
        try:
            summary = prepare_prompts(corpus, specs, folder, encoder, folder / "prompts")
        except DataError as error:
            assert "falls into train" in error.message or "over all domains" in error.message
            return
        kept = {split: read_prompts(folder / "prompts" / f"{split}.jsonl") for split in SPLITS}
        rejected = rejected_of(folder / "prompts")
    for domain, rows in {"mine": mine, "bench": bench, "other": other}.items():
        count = summary.domains[domain]
        assert count.input + count.blank_lines == len(rows)
        assert sum(row.domain == domain for rows in kept.values() for row in rows) == count.kept
        assert sum(row["domain"] == domain for row in rejected) == count.rejected
        assert count.kept + count.rejected == count.input
        assert sum(count.rejected_by_reason.values()) == count.rejected
        assert limit is None or count.kept <= limit
    roots, templates = {}, {}
    for split, rows in kept.items():
        for row in rows:
            first = next(turn["content"] for turn in row.messages if turn["role"] == "user")
            roots.setdefault(normalise(first).casefold(), set()).add((split, row.domain == "bench"))
            if row.template and row.domain != "bench":
                templates.setdefault((row.domain, row.template), set()).add(split)
    assert all(len(places) == 1 for places in [*roots.values(), *templates.values()])
    ids = [row.id for rows in kept.values() for row in rows]
    assert len(set(ids)) == len(ids)


def test_a_prompt_beyond_all_measure_is_too_long_without_being_tokenised(tmp_path, make_domain, make_settings, encoder):
    class Slow(type(encoder)):
        def round_trips(self, text):
            assert len(text) < 10_000, "it was tokenised"
            return True

    spec = make_domain("mine", [*MANY, {"prompt": "word " * 50_000}])
    prepare_prompts(make_settings("mine", max_prompt_tokens=100), [spec], tmp_path, Slow(), tmp_path / "out")
    (row,) = rejected_of(tmp_path / "out")
    assert (row["line"], row["category"]) == (121, "too-long")
    assert row["reason"] == "250000 characters, prompts.max_prompt_tokens is 100"
