"""How minutes of traffic are folded: exact for the busy queues, together for the quiet ones."""

from __future__ import annotations

from asyncgate.parts.model import stored
from asyncgate.parts.operating.traffic import Tally, fold, read_tallies, write_tallies


def test_of_many_queues_a_folded_row_keeps_the_busy_ones_apart_and_adds_up_the_others() -> None:
    many = {lane: Tally(started=lane, ended=1, type=f"t{lane}") for lane in range(1, 301)}
    rows = [stored.Traffic(f"{minute:012d}", "p", write_tallies(many).decode()) for minute in range(2)]

    folded = read_tallies(fold(rows))
    again = read_tallies(fold([stored.Traffic("0", "", write_tallies(folded).decode()), rows[0]]))

    assert folded.keys() == {*range(101, 301), 0}
    assert (folded[300].started, folded[0].started, folded[0].type) == (600, 2 * sum(range(1, 101)), "")
    for sums, times in ((folded, 2), (again, 3)):
        assert sum(counts.ended for counts in sums.values()) == 300 * times
