"""Who held a stage follows from the copies alone, whatever order they were written and read in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from dspark.errors import IntegrityError
from dspark.registry.chain import Chain, Link, Removed, chain_of, read_link, stage_model

MODEL = stage_model("demo", "production")


def link(version: int, replaces: int, **more) -> Link:
    fields = {"source_version": version, "package_digest": "a" * 64, "kind": "promotion", "by": "ada", "at": "now"}
    return Link(version=version, identity=f"id{version}", replaces=replaces, git_commit="c0ffee", **fields | more)


def story(chain: Chain) -> list[int]:
    return [entry.version for entry in chain.entries]


def test_of_two_that_replace_the_same_holder_the_lower_copy_wins():
    chain = chain_of(MODEL, [link(3, 1), link(1, 0), link(2, 1), link(4, 2)])
    assert story(chain) == [1, 2, 4] and chain.head.version == chain.tip == 4
    assert [copy.version for copy in chain.void] == [3] and chain.winner_over(chain.void[0]) == 2


def test_nothing_promoted_is_an_empty_chain():
    chain = chain_of(MODEL, [])
    assert chain.head is None and chain.tip == 0 and chain.entries == ()


@pytest.mark.parametrize("seed", range(40))
def test_what_writers_saw_win_has_won_however_they_overlap(seed):
    """Writers act on snapshots that may be stale by any amount; the oracle keeps a list under a lock.

    The lock's list grows by a copy exactly if the copy names the list's last one at the moment it is written: that is
    compare-and-set, which the registry does not have and the chain must amount to.
    """
    generator = random.Random(seed)
    copies: list[Link] = []
    truth: list[int] = []
    seen = [0]
    for version in range(1, 30):
        replaces = generator.choice(seen[-3:])
        copies.append(link(version, replaces))
        if replaces == (truth[-1] if truth else 0):
            truth.append(version)
        generator.shuffle(copies)
        chain = chain_of(MODEL, copies)
        assert story(chain) == truth
        assert sorted([*truth, *(copy.version for copy in chain.void)]) == list(range(1, version + 1))
        seen.append(chain.tip)


@pytest.mark.parametrize("seed", range(20))
def test_deleting_copies_turns_no_loser_into_a_winner(seed):
    """Losers are marked when they are seen; whichever copies are deleted then, those left keep their places."""
    generator = random.Random(seed)
    copies: list[Link] = []
    for version in range(1, 25):
        tips = [0, *story(chain_of(MODEL, copies))]
        copies.append(link(version, generator.choice(tips[-3:])))
    whole = chain_of(MODEL, copies)
    lost = {copy.version for copy in whole.void}
    left = [replace(copy, void="lost") if copy.version in lost else copy for copy in copies if generator.random() < 0.7]
    chain = chain_of(MODEL, left)
    kept = {copy.version for copy in left}
    assert [one.version for one in chain.links] == [version for version in story(whole) if version in kept]
    assert set(story(chain)) <= set(story(whole))


def test_a_link_that_was_deleted_is_still_told_of_and_is_not_named_again():
    chain = chain_of(MODEL, [link(1, 0), link(3, 2), link(4, 1)])
    assert chain.entries[1] == Removed(2) and story(chain) == [1, 2, 3]
    assert [copy.version for copy in chain.void] == [4]
    # The holder itself deleted: what was before it holds again, and the next one still follows the number that is gone.
    headless = chain_of(MODEL, [link(1, 0), link(3, 2, void="lost to version 4")])
    assert story(headless) == [1, 2] and headless.head.version == 1 and headless.tip == 2


def test_rolling_back_goes_back_and_never_forth():
    """1:A 2:B 3:C; back to B, back to A, and no further. After a new promotion the one before it is A again."""
    copies = [link(1, 0), link(2, 1), link(3, 2)]
    chain = chain_of(MODEL, copies)
    assert chain.before(chain.head).version == 2
    copies.append(link(4, 3, kind="rollback", restores=2, source_version=2))
    chain = chain_of(MODEL, copies)
    assert chain.before(chain.head).version == 1
    copies.append(link(5, 4, kind="rollback", restores=1, source_version=1))
    chain = chain_of(MODEL, copies)
    assert chain.before(chain.head) is None and story(chain) == [1, 2, 3, 4, 5]
    copies.append(link(6, 5))
    chain = chain_of(MODEL, copies)
    assert chain.before(chain.head).version == 1
    gone = chain_of(MODEL, [copy for copy in copies if copy.version not in (1, 6)])
    assert gone.before(gone.links[0]) == Removed(1)


def test_a_link_survives_its_tags():
    for one in (
        link(2, 1),
        link(1, 0, reason="first", gates="b" * 64, forced=True),
        link(9, 8, kind="rollback", restores=3, void="lost to version 8"),
    ):
        tags = {"dspark.package_digest": one.package_digest, **one.tags(MODEL)}
        if one.void:
            tags["dspark.promotion.void"] = one.void
        assert read_link(MODEL, one.version, tags) == one
        assert all(tags.values())  # an empty value does not survive MLflow's wire format


def test_a_version_that_no_promotion_into_this_model_wrote_is_no_link():
    """MLflow's own copying takes tags along: a copy of staging's version into production promotes nothing."""
    tags = {"dspark.package_digest": "a" * 64, **link(2, 1).tags(stage_model("demo", "staging"))}
    assert read_link(MODEL, 2, tags) is None
    assert read_link(MODEL, 2, {"dspark.package_digest": "a" * 64}) is None


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("replaces", None, "replaces"),
        ("replaces", "0", "0"),
        ("replaces", "x", "x"),
        ("replaces", "5", "later"),
        ("kind", "gift", "gift"),
        ("source_version", "-1", "-1"),
        ("restores", "7", "later"),
        ("id", None, "id"),
    ],
)
def test_changed_tags_are_an_error_that_names_the_version(key, value, named):
    tags = {"dspark.package_digest": "a" * 64, **link(5, 4).tags(MODEL)}
    tags.pop(f"dspark.promotion.{key}", None)
    if value is not None:
        tags[f"dspark.promotion.{key}"] = value
    with pytest.raises(IntegrityError, match=f"{MODEL} version 5.*{named}"):
        read_link(MODEL, 5, tags)
