"""The engine that `engine=auto` takes in a training: what `cputrain tune` has found fastest here, if it has."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from affinity.errors import InputError, RunError
from affinity.planner.defaults import tuning_name
from affinity.planner.records import ENGINE, Records, read_records
from affinity.topology.sysfs import read_machine
from cputrain.comm.group import all_gather
from cputrain.launch.recipe_request import request_of
from cputrain.recipe.schema import Recipe
from cputrain.training.engine import ENGINES, Engine, choose_engine
from cputrain.training.session import Session


def with_measured_engine(session: Session, env: Mapping[str, str]) -> Session:
    """The session of a training with the engine that rank 0's machine has measured, where engine=auto and every rank
    can use it. To be called by all ranks."""
    recipe = session.recipe
    if recipe.engine != "auto":
        return session
    # of the whole host: this rank is bound to a part of it
    records = read_records(read_machine(Path("/")), env) if session.ranks.is_main_rank else Records()
    found = all_gather(measured_engine(recipe, records))[0]
    if found is None:
        return session
    name, why = found
    chosen, problem = session.engine, ""
    if name != chosen.name:
        try:
            chosen = choose_engine(name, recipe.precision, env)
        except (InputError, RunError) as error:
            problem = str(error)
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(all_gather(problem)) if each]
    engine: Engine = replace(session.engine, why=problems[0]) if problems else replace(chosen, why=why)
    return replace(session, engine=engine)


def measured_engine(recipe: Recipe, records: Records) -> tuple[str, str] | None:
    """The engine that was measured for a recipe's network, precision and batch, and why; None where none was."""
    name = tuning_name(request_of(recipe))
    for record in records.of(ENGINE):
        engine, why = record.values.get("engine"), record.values.get("why")
        if name is not None and record.name == name and engine in ENGINES and isinstance(why, str):
            return engine, f"{why} ({record.command}, {record.date})"
    return None
