import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; threads that wait for each other's cores make small models ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
