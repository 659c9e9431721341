"""Any command of `asyncgate` with a provider of spans, which writes each span as a line of JSON to a file."""

import json
import os
import sys
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from asyncgate import main


class Lines(SpanExporter):
    """Writes spans to a file."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans."""
        with open(os.environ["SPANS_FILE"], "a") as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json())) + "\n")
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Lines()))
trace.set_tracer_provider(provider)
sys.exit(main())
