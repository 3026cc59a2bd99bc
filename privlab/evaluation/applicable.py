"""Which attacks run on a victim, on which block of it, and why the others cannot."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from privlab.base import PrivlabError, first, warn
from privlab.evaluation.case import (
    AnyAttack,
    Case,
    default_attacks,
    defense_of,
)
from privlab.release import (
    AnyDefense,
    effects_of,
    feature_capabilities,
    gradient_capabilities,
    released_parameters,
    served,
    trained_parameters,
    update_capabilities,
)
from privlab.release.releases import obstacles
from privlab.threat import (
    Attack,
    AttackClass,
    Capability,
    Client,
    DishonestAttack,
    Effects,
    FeatureAttack,
    Stack,
    attack_declarations,
    check_capabilities,
    defense_declarations,
)
from privlab.victims import Victim, check_classifies


@dataclass(frozen=True, eq=False)
class AttackGroup:
    """The attacks that run on one block variant of a victim, from one observation."""

    victim: Victim
    attacks: tuple[Attack | FeatureAttack, ...]

    @property
    def server(self) -> DishonestAttack | None:
        """Return the attack that chooses the weights for this group, whose only attack it is; None if none does."""
        return server_of(self.attacks[0]) if self.attacks else None

    @property
    def key(self) -> tuple[str, str]:
        """Return what distinguishes the releases of the groups of a victim: the block, and who chose the weights."""
        return self.victim.block, "" if self.server is None else self.server.name

    @property
    def parameters(self) -> list[str]:
        """Return the names of the gradients that the attacks read; "*" stands for all that are released."""
        attacks = [attack for attack in self.attacks if isinstance(attack, Attack)]
        names = [name for attack in attacks for name in attack.parameters]
        released = released_parameters(self.victim.model)
        if "*" in names:
            return sorted(released)
        names += [n for attack in attacks for n in attack_declarations(attack).if_released if n in released]
        return list(dict.fromkeys(names))


def plan(spec: Case, base: Victim) -> list[AttackGroup]:
    """Return the attacks of one victim in groups; --block auto is the stock block where attacks can run, else April's.

    That no attack reads what a client releases is a result, and no evidence of privacy: there are no groups then.

    Raises:
        PrivlabError: if an attack that was asked for lacks a capability on each allowed block.

    Warns:
        PrivlabWarning: for each attack that was not asked for by name and cannot run.
    """
    groups, refused = applicable(spec, base)
    refusals = [f"{base.name}: {refusal}" for refusal in refused.values()]
    if refusals and spec.adversary.attacks is not None:
        raise PrivlabError(refusals[0])
    if refusals and not groups:
        warn(f"{base.name}: no evidence: {_none_runs(refused)}")
        return groups
    for refusal in refusals:
        warn(f"Left out. {refusal}")
    return groups


def _none_runs(refused: Mapping[str, str]) -> str:
    """Return one short line on why no attack can run: the commonest reason, with the first attack that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, refusal in refused.items():
        by_reason.setdefault(refusal.removeprefix(f"Attack '{name}' "), []).append(f"'{name}'")
    reason, names = max(by_reason.items(), key=lambda item: len(item[1]))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    rest = len(refused) - len(names)
    others = f" {rest} {'has' if rest == 1 else 'have'} other reasons; --attack NAME says which." if rest else ""
    return f"No attack can run. {names[0]}{more}: {reason}{others}"


def applicable(spec: Case, base: Victim, *, stand_ins: bool = False) -> tuple[list[AttackGroup], dict[str, str]]:
    """Return the groups of the attacks that can run on a victim, and for each other attack the reason why it cannot.

    Attacks that are not named come cheapest first, in the order of the registry; the costliest group is last.

    Args:
        spec: names the attacks (None: those of its release and defense that need not be named), their options, the
            block and the defense.
        base: the victim; a group has it with the block on which its attacks run.
        stand_ins: whether to keep attacks that only replace others where those cannot run. Named ones are always kept.

    Raises:
        PrivlabError: if an option does not fit an attack, or the victim has fewer blocks than the client is to hold, or
            no classifier where the clients' loss has labels.
    """
    base.model.check_cut_layer(spec.cut_layer)
    if not spec.features_released and (spec.client is None or spec.client.has_labels):
        check_classifies(base.model)
    groups: dict[tuple[str, str], AttackGroup] = {}
    refused: dict[str, str] = {}
    defense = defense_of(spec, base, "c").parts if any(setting != "a" for setting in spec.settings) else ()
    for name, given in _candidates(spec, effects_of(base.model, defense), Stack(defense).mixes_images).items():
        running = {attack.name for group in groups.values() for attack in group.attacks}
        if spec.adversary.attacks is None and not stand_ins and stands_in(given, running):
            continue
        attack = spec.adversary.made(given) if isinstance(given, type) else given
        try:
            home = _home(attack, spec, base, defense, groups)
        except PrivlabError as refusal:
            refused[name] = str(refusal)
            continue
        alone = AttackGroup(home, (attack,))
        before = groups.pop(alone.key, None)
        groups[alone.key] = alone if before is None else replace(before, attacks=(*before.attacks, attack))
    return list(groups.values()), refused


def server_of(attack: Attack | FeatureAttack) -> DishonestAttack | None:
    """Return an attack as the server that chooses the weights, or None if it requires no such server."""
    cheats = Capability.CHOOSES_WEIGHTS in attack.requires
    return attack if cheats and isinstance(attack, DishonestAttack) else None


def stands_in(attack: Attack | FeatureAttack | AttackClass, running: Container[str]) -> bool:
    """Return whether an attack only replaces certain others where these cannot run, and one of them is `running`."""
    return any(name in running for name in attack_declarations(attack).stands_in_for)


def _candidates(spec: Case, effects: Effects, mixes: bool) -> dict[str, AnyAttack | AttackClass]:
    """Return the attacks that are given, or else those of this release, client, defense (its effects) and effort."""
    if spec.adversary.attacks is not None:
        return {attack.name: attack for attack in spec.adversary.attacks}
    return {
        name: kind
        for name, kind in default_attacks(spec.adversary.effort).items()
        if (Capability.RELEASED_FEATURES in kind.requires) == spec.features_released
        and (Capability.GRADIENT_DEFENSE not in kind.requires or spec.defends_gradients)
        and (Capability.PERMUTED_VALUES not in kind.requires or effects.values)
        and (Capability.FILTERED_IMAGES not in kind.requires or effects.other)
        and (Capability.MIXED_IMAGES not in kind.requires or mixes)
        and (Capability.CLIENT_UPDATE not in kind.requires or spec.client is not None)
        and unread(kind, spec.client, filtered=spec.defends_gradients) is None
    }


def unread(
    attack: Attack | FeatureAttack | AttackClass, client: Client | None, *, filtered: bool = False
) -> str | None:
    """Return why an attack does not read the updates of a client; None where it does, or where there is no client.

    Args:
        attack: the attack or its class.
        client: the public settings, None where gradients or features are released.
        filtered: whether a defense acts on the update, in whose units its parameters are: it is not a gradient then.
    """
    declared = attack_declarations(attack)
    if client is None or client.optimiser in (optimisers := declared.updates_of):
        refusal = None if client is None else declared.refuses(client)
        if client is not None and client.clients > 1 and not declared.reads_means:
            refusal = (
                f"reads the update of one client, and here the mean of client.clients={client.clients} is released"
            )
        return refusal and f"Attack '{attack.name}' {refusal}. That it does not apply is no evidence of privacy."
    reads_features = Capability.RELEASED_FEATURES in attack.requires
    of_gradients = not reads_features and Capability.CLIENT_UPDATE not in attack.requires
    if client.gradient_factor is not None and not filtered and of_gradients:  # one step of SGD is a gradient
        return None
    how = f"reads updates of {' and '.join(optimisers)}" if optimisers else "reads the gradient of one step"
    how = "reads features" if reads_features else how
    behind = " behind a filter" if filtered else ""
    trains = f"trains by {client.optimiser} (steps: {client.total_steps}, images: {client.images}"
    trains += f", mean of {client.clients} clients){behind}" if client.clients > 1 else f"){behind}"
    return (
        f"Attack '{attack.name}' {how}, and this run releases the update of a client that {trains}. That it does not "
        "apply is no evidence of privacy."
    )


def _home(
    attack: Attack | FeatureAttack,
    spec: Case,
    base: Victim,
    defense: Sequence[AnyDefense],
    groups: dict[tuple[str, str], AttackGroup],
) -> Victim:
    """Return the first allowed block variant on which an attack may run; a variant that `groups` has is used again."""
    client, public = spec.client, spec.adversary.public_limit
    if spec.features_released:
        check_capabilities(attack, feature_capabilities(base.model, public, defense, spec.cut_layer))
        return base
    if (reason := unread(attack, client, filtered=spec.defends_gradients)) is not None:
        raise PrivlabError(reason)
    names = {*attack_declarations(attack).parameters} - {"*"}
    if client is not None and (left := sorted(name for name in names if not client.chooses(name))):
        raise PrivlabError(
            f"Attack '{attack.name}' needs {first(left, 3)}, which this client did not train (client.trains="
            f"{client.trains}). That it does not run is no evidence of privacy."
        )
    blocks = ("stock", "april") if spec.victim.block == "auto" else (spec.victim.block,)
    force = spec.adversary.force and spec.victim.block != "auto"
    refusal: PrivlabError | None = None
    anywhere: frozenset[Capability] = frozenset()
    for block in blocks:
        try:
            made = groups.get((block, ""))
            variant = base.with_block(block) if made is None else made.victim
            if client is None:
                grants = gradient_capabilities(variant.model, defense, spec.release.images, public=public)
            else:
                variant = variant if made else replace(variant, model=served(variant.model, client))
                grants = update_capabilities(variant.model, client, defense)
            if spec.chooses_weights:
                grants |= {Capability.CHOOSES_WEIGHTS}
            anywhere |= grants
            check_capabilities(attack, grants, force=force, because=_because(base, spec))
            _check_released(attack, variant, client, defense)
        except PrivlabError as error:
            refusal = error
        else:
            return variant
    assert refusal is not None
    if anywhere:  # the error names only what no block grants; a block that cannot be made grants nothing
        check_capabilities(attack, anywhere, force=force, because=_because(base, spec))
    raise refusal


def _because(base: Victim, spec: Case) -> dict[Capability, str]:
    """Return why a capability is not granted, where its own text does not say."""
    found, client = obstacles(base.model), spec.client
    if client is not None and client.released_images > 1:
        several = [name for name in ("clients", "images") if getattr(client, name) > 1]
        of = " and ".join(f"client.{name}={getattr(client, name)}" for name in several)
        worst = " and ".join(f"client.{name}=1" for name in several)
        found[Capability.BATCH_SIZE_ONE] = (
            f"each update is of {of}, which this attack does not separate. That is no evidence of privacy: {worst} "
            f"{'are' if len(several) > 1 else 'is'} the worst case"
        )
    return found


def _check_released(
    attack: Attack | FeatureAttack, victim: Victim, client: Client | None, defense: Sequence[AnyDefense]
) -> None:
    """Refuse an attack that reads a parameter that the model freezes, the client does not train or a filter withholds.

    One that reads all of them is refused too where a filter withholds some.
    """
    names = attack_declarations(attack).parameters
    if frozen := [name for name in names if name in victim.model.frozen]:
        raise PrivlabError(f"Attack '{attack.name}' reads gradients of frozen parameters: {', '.join(frozen)}.")
    if client is not None and (left := {*names} - {"*", *trained_parameters(victim.model, client)}):
        raise PrivlabError(
            f"Attack '{attack.name}' reads the update of {', '.join(sorted(left))}, which client.trains="
            f"{client.trains} leaves out. That it does not apply is no evidence of privacy."
        )
    for part in defense:
        withheld = defense_declarations(part).withholds(released_parameters(victim.model))
        if read := withheld if "*" in names else withheld & {*names}:
            raise PrivlabError(
                f"Attack '{attack.name}' reads {first(sorted(read), 3)}, which defense '{part.name}' leaves out. That "
                "it does not apply is no evidence of privacy."
            )
