# The image of examples/digits.yaml for the tests: no torch in it. The tests' own environment, which the nodes share
# with every container, stands where this says; copying its 7 GB into an image would test nothing more.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG ENVIRONMENT
ARG REPOSITORY
# The environment may be below root's home, which is closed to others.
RUN chmod 755 /root
ENV PATH=${ENVIRONMENT}/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR ${REPOSITORY}
USER 65532:65532
