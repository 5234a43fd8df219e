# attnd in a container.
#   docker build -t attnd .                            CPU paths
#   docker build -t attnd --build-arg VARIANT=cuda .   built where nvcc is present; runs with --gpus
# deploy/build_image.sh does the same with docker, podman or buildah, with or without a registry.
ARG VARIANT=cpu
ARG CPU_BUILD_IMAGE=debian:12
ARG CPU_RUNTIME_IMAGE=debian:12-slim
ARG CUDA_BUILD_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04
ARG CUDA_RUNTIME_IMAGE=nvidia/cuda:12.6.3-runtime-ubuntu24.04

# VARIANT picks one of each pair by name.
FROM ${CPU_BUILD_IMAGE} AS build-on-cpu
FROM ${CUDA_BUILD_IMAGE} AS build-on-cuda
FROM ${CPU_RUNTIME_IMAGE} AS run-on-cpu
FROM ${CUDA_RUNTIME_IMAGE} AS run-on-cuda

# ------------------------------------------------------------------------------------------ build
FROM build-on-${VARIANT} AS build
ARG VARIANT
ARG REVISION=unknown
WORKDIR /src
COPY deploy/packages.sh deploy/runtime_packages.sh deploy/
RUN deploy/packages.sh build
COPY CMakeLists.txt ./
COPY cmake cmake
COPY proto proto
COPY kernels kernels
COPY server server
COPY client client
COPY tests/reference tests/reference
RUN if [ "$VARIANT" = cuda ]; then nvcc --version; fi \
 && cmake -S . -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DATTN_BUILD_TESTS=OFF -DATTN_BUILD_BENCH=OFF -DATTN_GIT_COMMIT="$REVISION" \
 && cmake --build /build --target attnd attn \
 && install -D -t /out/bin $(find /build -type f -executable \( -name attnd -o -name attn \)) \
 && strip /out/bin/attnd /out/bin/attn \
 && deploy/runtime_packages.sh /out/bin/attnd /out/bin/attn > /out/packages

# ---------------------------------------------------------------------------------------- runtime
FROM run-on-${VARIANT} AS runtime
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="attnd" \
      org.opencontainers.image.description="Exact attention, forward and backward, over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# Shared libraries only: the packages that own what the two programs load.
COPY --from=build /out/packages /usr/share/attnd/packages
RUN apt-get update -qq \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      $(cat /usr/share/attnd/packages) \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb \
 && useradd --system --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin attnd
COPY --from=build /out/bin/attnd /out/bin/attn /usr/local/bin/

USER 10001:10001
EXPOSE 50051 9464

# attnd is process 1 and handles SIGTERM itself: health flips, new calls are refused, calls in
# flight finish within --drain-timeout.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/local/bin/attnd"]
# A container's port is reachable only where it is published, so the plain-text public bind is asked
# for here, in sight. To serve TLS, give your own arguments: --listen 0.0.0.0:50051 --tls-cert ...
CMD ["--listen", "0.0.0.0:50051", "--metrics-listen", "0.0.0.0:9464", "--allow-insecure-public"]
# Asks 127.0.0.1:50051, or what ATTN_SERVER says.
HEALTHCHECK --interval=10s --timeout=8s --start-period=20s --retries=3 \
  CMD ["/usr/local/bin/attn", "status"]
