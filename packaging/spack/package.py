"""cputrain for Spack: packages/py_cputrain/package.py of a repository of yours, built from its source:

spack develop --path /path/to/cputrain py-cputrain@0.1.0
"""

from spack.package import *


class PyCputrain(PythonPackage):
    """Plan, launch and train on CPU clusters: many bound workers per host, large batches, current PyTorch."""

    license("Apache-2.0")

    version("0.1.0")

    variant("tensorboard", default=False, description="Write TensorBoard's files")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")
    depends_on("py-annotated-types@0.6:", type=("build", "run"))
    depends_on("py-click@8.2:", type=("build", "run"))
    depends_on("py-google-crc32c@1.5:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-pillow@10.3:", type=("build", "run"))
    depends_on("py-psutil@5.9:7", type=("build", "run"))
    depends_on("py-pydantic@2.7:", type=("build", "run"))
    depends_on("py-pyyaml@6.0:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-safetensors@0.4.3:", type=("build", "run"))
    depends_on("py-torch@2.8:2.13 ~cuda ~rocm +distributed +gloo", type=("build", "run"))
    depends_on("py-torchvision@0.23:0.28", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-tensorboard@2.17:", type="run", when="+tensorboard")
    depends_on("gperftools", type="run")
    depends_on("libjpeg-turbo", type="run")
    # The oneCCL backend is compiled on first use, with Spack's compiler: see docs/guides/containers.md.
    depends_on("cxx", type=("build", "run"))
