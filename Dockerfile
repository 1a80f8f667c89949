# Images of a job group's nodes with everything that their `setup` installs: `make image` builds all of them.
#
# pip still installs the checkout that SkyPilot uploads, which takes seconds and no network, and what has changed in
# pyproject.toml since. python:3.11-bookworm and SGLang's image are those of jobgroup.yaml.

FROM python:3.11-bookworm AS python
# What SkyPilot installs in each pod that lacks it.
RUN apt-get update && apt-get install -y --no-install-recommends \
    curl gcc netcat-openbsd openssh-server patch pciutils rsync wget && rm -rf /var/lib/apt/lists/*
# pip builds the checkout with this setuptools. The variable's 0 turns isolation off: pip negates it.
RUN pip install --no-cache-dir 'setuptools>=77'
ENV PIP_NO_BUILD_ISOLATION=0
COPY . /tmp/checkout
WORKDIR /tmp/checkout

# data-server, reward-server, replay-buffer, gateway, environment-server, collector, and docs/cluster/clean.yaml.
FROM python AS services
# Isolates programs for the reward `code`.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint constraints.txt '.[data,reward,replay,gateway,environment,collector,local]'
RUN PIP_NO_INDEX=1 pip install --no-deps --force-reinstall . && pip uninstall --yes skypilot-grpo
WORKDIR /root

FROM python AS trainer
# NCCL loads these for InfiniBand and RoCE; without them it uses TCP.
RUN apt-get update && apt-get install -y --no-install-recommends \
    libibverbs1 ibverbs-providers librdmacm1 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint constraints.txt 'torch==2.14.1' '.[trainer,trackio,evaluation]'
RUN PIP_NO_INDEX=1 pip install --no-deps --force-reinstall . && pip uninstall --yes skypilot-grpo
WORKDIR /root

FROM lmsysorg/sglang:v0.5.23-cu130 AS rollout
RUN apt-get update && apt-get install -y --no-install-recommends \
    curl gcc netcat-openbsd openssh-server patch pciutils rsync wget && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'setuptools>=77'
ENV PIP_NO_BUILD_ISOLATION=0
COPY . /tmp/checkout
WORKDIR /tmp/checkout
# An image whose SGLang does not have exactly the version that is asked for would get torch and NCCL anew, of other versions.
RUN pip install --no-cache-dir --dry-run '.[sglang]' | tee /tmp/plan && \
    if grep -E 'Would install.* (sglang|torch|nvidia-nccl-cu13)-[0-9]' /tmp/plan; then echo 'take the image of the SGLang that pyproject.toml pins'; exit 1; fi
RUN pip install --no-cache-dir '.[sglang]'
RUN PIP_NO_INDEX=1 pip install --no-deps --force-reinstall . && pip uninstall --yes skypilot-grpo
WORKDIR /root

# A trainer with engines on its nodes: SGLang pins a torch of its own, so that the trainer has an environment beside it.
FROM rollout AS colocated
WORKDIR /tmp/checkout
RUN python -m venv /opt/trainer && /opt/trainer/bin/pip install --no-cache-dir 'setuptools>=77'
RUN /opt/trainer/bin/pip install --no-cache-dir --constraint constraints.txt 'torch==2.14.1' '.[trainer,rollout,trackio,evaluation]'
RUN PIP_NO_INDEX=1 /opt/trainer/bin/pip install --no-deps --force-reinstall . && /opt/trainer/bin/pip uninstall --yes skypilot-grpo
WORKDIR /root
