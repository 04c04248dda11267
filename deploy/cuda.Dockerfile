# mlmclm on NVIDIA GPUs; the machine needs the driver and the NVIDIA container toolkit.
#
#   docker build -f deploy/cuda.Dockerfile -t mlmclm:cuda .
#   docker run --rm --gpus all --shm-size 16g -v mlmclm-store:/home/mlmclm/store mlmclm:cuda study quickstart
#
# torch brings CUDA's libraries with it. The base has the compiler, for which DeepSpeed looks when it finds a GPU.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM python:3.11-slim AS empty
# The package without its code. The layer of dependencies is built anew only where pyproject.toml or the versions change.
COPY pyproject.toml /source/
RUN touch /source/README.md && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim AS whole
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM ${BASE}

# Triton compiles the launchers of its kernels with a C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY constraints.txt /opt/mlmclm/
COPY scripts/install.sh /opt/mlmclm/scripts/
COPY --from=empty /wheels /opt/mlmclm/empty
RUN DEVICE=cuda PIP_NO_CACHE_DIR=1 WHEEL=$(echo /opt/mlmclm/empty/*.whl) \
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
