"""`fletch.Epochs` as an `IterableDataset` of PyTorch, for frameworks that make a loader of a dataset.

    DataLoader(IterableEpochs(epochs, decode), batch_size=None, num_workers=0)
"""

from torch.utils.data import IterableDataset


class IterableEpochs(IterableDataset):
    """The next epoch of a job: what `decode` makes of each list of samples.

    `decode` gets a list of `fletch.EpochSample`. A loader over it has no workers, because the epochs belong
    to one process.
    """

    def __init__(self, epochs, decode):
        self.epochs, self.decode = epochs, decode

    def __iter__(self):
        return map(self.decode, self.epochs.epoch())

    def __len__(self):
        return len(self.epochs)

    def state_dict(self):
        return self.epochs.state_dict()

    def load_state_dict(self, state):
        self.epochs.load_state_dict(state)
