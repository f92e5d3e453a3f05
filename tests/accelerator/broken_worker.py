"""A resident worker on a device whose kernel has failed."""

from tests.accelerator.device import install

device = install()  # before libraries are imported

from client_app.worker import main  # noqa: E402

if __name__ == "__main__":
    with device.broken():
        main()
