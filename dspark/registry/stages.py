"""Stages in a registry: read a chain, mend the aliases that follow from it, add a link.

Aliases are for people and other programs. Whoever reads a stage here works its holder out from the chain and then sets
right what an interrupted promotion, or a hand, left behind. Who sets an alias looks at the chain again afterwards: of
several at once the last to write has seen every link, so no older holder stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dspark.errors import GateError, SettingsError
from dspark.registry.chain import PREFIX, VOID_TAG, Chain, Link, chain_of, read_link, stage_model
from dspark.registry.gate_report import Stage
from dspark.registry.register import model_name
from dspark.registry.tracking import Registry

_PATIENCE = 4
BUILD_TAG, STAGE_TAG = "dspark.build", "dspark.stage"


def read_chain(registry: Registry, build: str, stage: Stage) -> Chain:
    """The history of a stage as the registry has it now; nothing is changed.

    Raises:
        IntegrityError: tags of a promotion were changed by hand.
        SettingsError: a model of the stage's name is something else.
    """
    return _read(registry, build, stage)[0]


def settled(registry: Registry, build: str, stage: Stage) -> tuple[Chain, tuple[str, ...]]:
    """The history of a stage, with aliases and marks set right.

    Returns:
        the chain, and one line for each thing that was mended.
    Raises:
        IntegrityError, SettingsError: as `read_chain`.
        MlflowException: the registry may be read, not changed.
    """
    mended: list[str] = []
    failures = 0
    while True:
        chain, model = _read(registry, build, stage)
        before = len(mended)
        try:
            mended += _mark_void(registry, chain)
            mended += _set_aliases(registry, build, stage, chain, model)
        except registry.mlflow.exceptions.MlflowException:
            # Two that write the same new row at once: one is refused, and finds it there when it looks again.
            failures += 1
            if failures == _PATIENCE:
                raise
            continue
        if len(mended) == before:
            return chain, tuple(mended)


def append(
    registry: Registry, build: str, stage: Stage, chain: Chain, link: Link, source: Any, extra: Mapping[str, str]
) -> Chain:
    """Add a promotion to a stage: the copy and everything about it in one transaction, then aliases.

    Stopped before the copy exists, nothing has happened; after it, the promotion has, and any reader completes it.

    Args:
        chain: as it was when the link was made.
        link: what to write; its version is given by the registry.
        source: the version of the build's model that is copied.
        extra: further tags of the copy.
    Returns:
        the chain, of which the link is a part.
    Raises:
        GateError: somebody else replaced the same holder first; the copy is marked as void.
        MlflowException: the copy was not made.
    """
    model = chain.model
    if not chain.entries:
        _create_model(registry, build, stage)
    tags = {key: value for key, value in source.tags.items() if not key.startswith(PREFIX)}
    try:
        registry.client.create_model_version(
            model,
            f"models:/{source.name}/{source.version}",
            source.run_id,
            tags=tags | dict(extra) | link.tags(model),
            description=source.description,
            await_creation_for=0,
            model_id=source.model_id,
        )
    except Exception:
        # An answer that was lost on the way, or that a retry got, is no failure: what counts is what is there.
        if not _written(registry, model, link.identity):
            raise
    chain, _ = settled(registry, build, stage)
    if chain.holds(link.identity) is None:
        raise GateError(
            f"{model}: somebody else was first: version {_winner(chain, link)} replaced "
            f"{f'version {link.replaces}' if link.replaces else 'nobody'} while this promotion was under way",
            f"see who: dspark registry history {build} --stage {stage}",
        )
    return chain


def versions(registry: Registry, model: str) -> Iterator[Any]:
    """All versions of a model, by number; those that were deleted are not among them."""
    token: str | None = None
    while True:
        page = registry.client.search_model_versions(
            f"name = '{model}'", max_results=200, order_by=["version_number ASC"], page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def registered_model(registry: Registry, model: str) -> Any | None:
    """A registered model, or None."""
    return next(iter(registry.client.search_registered_models(f"name = '{model}'")), None)


def _read(registry: Registry, build: str, stage: Stage) -> tuple[Chain, Any | None]:
    """The chain, and the stage's model that it was read from; None: there is none yet."""
    model = stage_model(build, stage)
    found = registered_model(registry, model)
    if found is None:
        return Chain(model), None
    if found.tags.get(STAGE_TAG) != stage:
        raise SettingsError(
            f"{model} is registered and holds no promotions: it belongs to a build of that name",
            f"give that build another name; {model} is where build {build!r} is promoted to",
        )
    links = (read_link(model, int(item.version), item.tags) for item in versions(registry, model))
    return chain_of(model, [link for link in links if link is not None]), found


def _create_model(registry: Registry, build: str, stage: Stage) -> None:
    """Create the stage's model unless it is there; somebody else may be doing so right now."""
    model = stage_model(build, stage)
    if registered_model(registry, model) is not None:
        return
    try:
        registry.client.create_registered_model(model, tags={BUILD_TAG: build, STAGE_TAG: stage})
    except registry.mlflow.exceptions.MlflowException:
        if registered_model(registry, model) is None:
            raise


def _written(registry: Registry, model: str, identity: str) -> bool:
    return any(item.tags.get(f"{PREFIX}id") == identity for item in versions(registry, model))


def _winner(chain: Chain, link: Link) -> str:
    return str(chain.winner_over(link) or "(deleted since)")


def _mark_void(registry: Registry, chain: Chain) -> list[str]:
    done = []
    for copy in chain.void:
        if copy.void is None:
            lost = f"lost to version {_winner(chain, copy)}"
            registry.client.set_model_version_tag(chain.model, str(copy.version), VOID_TAG, lost)
            done.append(f"{chain.model} version {copy.version} marked as void: {lost}")
    return done


def _set_aliases(registry: Registry, build: str, stage: Stage, chain: Chain, model: Any | None) -> list[str]:
    """Let the alias of the stage name its holder, on the stage's model and on the build's."""
    named_by = registered_model(registry, model_name(build))
    head = chain.head
    wanted = ((model, head.version), (named_by, head.source_version)) if head else ((model, None), (named_by, None))
    done = []
    for found, version in wanted:
        if found is None:
            continue
        named = found.aliases.get(stage)
        if version is None:
            if named is not None:
                registry.client.delete_registered_model_alias(found.name, stage)
                done.append(f"alias {stage} of {found.name} named version {named}, which nobody promoted: removed")
        elif str(named) != str(version) and _exists(registry, found.name, version):
            registry.client.set_registered_model_alias(found.name, stage, str(version))
            instead = f", not {named}" if named else ""
            done.append(f"alias {stage} of {found.name} names version {version} now{instead}")
    return done


def _exists(registry: Registry, model: str, version: int) -> bool:
    """False for a version of the build's model that was deleted; its copy still serves."""
    return bool(registry.client.search_model_versions(f"name = '{model}' and version_number = {version}"))
