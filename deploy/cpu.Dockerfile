# mlmclm on CPUs.
#
#   docker build -f deploy/cpu.Dockerfile -t mlmclm .
#   docker run --rm --shm-size 4g -v mlmclm-store:/home/mlmclm/store mlmclm study quickstart
FROM python:3.11-slim AS empty
# The package without its code. The layer of dependencies is built anew only where pyproject.toml or the versions change.
COPY pyproject.toml /source/
RUN touch /source/README.md && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim AS whole
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim

# DeepSpeed and Triton compile small extensions when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# An index with CPU builds of torch makes the image several GB smaller: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""

COPY constraints.txt /opt/mlmclm/
COPY scripts/install.sh /opt/mlmclm/scripts/
COPY --from=empty /wheels /opt/mlmclm/empty
RUN DEVICE=cpu PIP_NO_CACHE_DIR=1 WHEEL=$(echo /opt/mlmclm/empty/*.whl) \
    bash /opt/mlmclm/scripts/install.sh /opt/environment postgresql,s3
COPY --from=whole /wheels /opt/mlmclm/whole
RUN /opt/environment/bin/pip install --no-cache-dir --no-deps --force-reinstall /opt/mlmclm/whole/*.whl

# A user of its own: what a study runs has no reason to be root. A named volume at store/ gets this owner.
RUN useradd --uid 10001 --create-home mlmclm \
    && chmod 755 /home/mlmclm \
    && install -d -o mlmclm -g mlmclm /home/mlmclm/store
USER 10001
WORKDIR /home/mlmclm
ENV PATH=/opt/environment/bin:$PATH MLMCLM_STORE=/home/mlmclm/store RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT ["mlmclm"]
CMD ["--help"]
