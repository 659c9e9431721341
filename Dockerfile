# One process, no root, all state in /data.
#   docker build -t asyncgate .
#   docker run -p 8080:8080 -v asyncgate:/data -e ASYNCGATE_API_KEY=... asyncgate
# With a replica of the database in a bucket (docs/recovery.md):
#   docker build --build-arg EXTRAS=redis,backup -t asyncgate .
#   docker run -p 8080:8080 -v asyncgate:/data -e ASYNCGATE_API_KEY=... \
#     -e AWS_ACCESS_KEY_ID=... -e AWS_SECRET_ACCESS_KEY=... --entrypoint litestream asyncgate \
#     replicate -exec "asyncgate serve --host 0.0.0.0 --port 8080" /data/asyncgate.db s3://BUCKET/gate

FROM python:3.12-slim AS build
# Optional parts of the package: redis, backup (Litestream), traces.
ARG EXTRAS=redis
WORKDIR /src
# What is not in .ci/image.txt, or has another hash there, does not get into the image.
COPY .ci/image.txt ./
RUN pip download --no-cache-dir --require-hashes --no-deps --only-binary :all: --dest /wheels -r image.txt
COPY pyproject.toml hatch_build.py CHANGELOG.md README.md SECURITY.md LICENSE asyncgate.py ./
COPY backends backends
COPY clients clients
COPY commands commands
COPY conformance conformance
COPY docs docs
COPY extras extras
COPY parts parts
COPY skills skills
RUN python -m venv --without-pip /opt/asyncgate \
 && pip --python /opt/asyncgate/bin/python install --no-cache-dir --no-index --find-links /wheels ".[$EXTRAS]"

FROM python:3.12-slim
COPY --from=build /opt/asyncgate /opt/asyncgate
# The owner of /data is set before VOLUME, so that a new volume takes it over.
RUN groupadd --gid 10001 asyncgate \
 && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin asyncgate \
 && install --directory --owner=10001 --group=10001 --mode=0700 /data
ENV PATH=/opt/asyncgate/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ASYNCGATE_DATABASE_URL=sqlite:////data/asyncgate.db
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["asyncgate"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
