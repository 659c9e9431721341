"""`asyncgate skill`: print or install the skill that teaches an agent to use the gate."""

from __future__ import annotations

from pathlib import Path

import click

from asyncgate.commands.calling import EXIT_CONFLICT, exit_with

SKILL_NAME = "asyncgate"
SKILL = Path(__file__).parents[1] / "skills" / SKILL_NAME / "SKILL.md"
PLACE = Path(".claude") / "skills"      # below a project, or below the home directory


@click.command(epilog="Example: asyncgate skill --install --dir .agents/skills")
@click.option("--install", "installs", is_flag=True,
              help="Write the skill to .claude/skills/asyncgate/SKILL.md of this project.")
@click.option("--user", is_flag=True, help="With --install: write to the home directory, for all projects.")
@click.option("--dir", "folder", metavar="PATH", type=click.Path(file_okay=False, path_type=Path),
              help="With --install: write to PATH/asyncgate/SKILL.md.")
@click.option("--force", is_flag=True, help="With --install: overwrite a file that differs.")
def skill(installs: bool, user: bool, folder: Path | None, force: bool) -> None:
    """Print the skill that teaches an agent to use the gate, or install it.

    A skill is a file SKILL.md (agentskills.io) that agents read when they need it.  Some agents use another folder:
    --dir .agents/skills.
    """
    if not installs and (user or folder or force):
        raise click.UsageError("--user, --dir and --force need --install")
    if user and folder:
        raise click.UsageError("--user and --dir exclude each other")
    text = SKILL.read_text(encoding="utf-8")
    if not installs:
        return click.echo(text, nl=False)
    install_skill((folder or (Path.home() / PLACE if user else PLACE)) / SKILL_NAME / SKILL.name, text, force)


def install_skill(target: Path, text: str, force: bool) -> None:
    """Write the skill; do not overwrite a changed file unless forced."""
    try:
        there = target.read_text(encoding="utf-8") if target.exists() else None
        if there == text:
            return click.echo(f"{target} is up to date")
        if there is not None and not force:
            raise exit_with(f"{target} differs from the skill of this version and was not changed; "
                            "--force overwrites it",
                        EXIT_CONFLICT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
    click.echo(f"wrote {target}")
