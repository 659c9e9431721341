"""The driver of NATS JetStream: a stream of work on disk; each client has a connection and pulls for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType

from asyncgate.bench.peers import child
from asyncgate.commands.bench.load import TASKS_PER_BATCH

NAME = "bench"
MOST_UNACKNOWLEDGED = 100_000
PATIENCE = 60.0     # seconds for an answer: a slow disk is measured, too


@contextlib.asynccontextmanager
async def open_peer(url: str, clients: int) -> AsyncIterator[child.Modes]:
    """Create the stream and its consumer, and connect every client."""
    async with contextlib.AsyncExitStack() as stack:
        streams, pulls = list[Any](), list[Any]()
        for number in range(clients):
            connection = await nats.connect(url)
            stack.push_async_callback(connection.close)
            streams.append(connection.jetstream())
            if number == 0:
                await streams[0].add_stream(name=NAME, subjects=[NAME], storage=StorageType.FILE,
                                            retention=RetentionPolicy.WORK_QUEUE)
                await streams[0].add_consumer(NAME, ConsumerConfig(durable_name=NAME, ack_policy=AckPolicy.EXPLICIT,
                                                                   max_ack_pending=MOST_UNACKNOWLEDGED))
            pulls.append(await streams[-1].pull_subscribe_bind(NAME, NAME))

        async def cycle(client: int) -> AsyncIterator[str]:
            await streams[client].publish(NAME, child.PAYLOAD, timeout=PATIENCE)
            yield child.CREATE
            [message] = await pulls[client].fetch(1, timeout=PATIENCE)
            yield child.CLAIM
            await message.ack_sync(timeout=PATIENCE)
            yield child.COMPLETE

        async def batch(client: int) -> AsyncIterator[str]:
            publish = streams[client].publish
            await asyncio.gather(*(publish(NAME, child.PAYLOAD, timeout=PATIENCE) for _ in range(TASKS_PER_BATCH)))
            yield child.CREATE_MANY
            messages = await pulls[client].fetch(TASKS_PER_BATCH, timeout=PATIENCE)
            yield child.CLAIM_MANY
            await asyncio.gather(*(message.ack_sync(timeout=PATIENCE) for message in messages))
            yield child.COMPLETE_MANY

        yield {"cycle": cycle, "batch": batch}
