"""Numbers on their way to a device: whole on arrival, and in no buffer that is still copied from."""

import numpy as np
import torch

from llmq.runtime.staging import NUM_BUFFERS, DeviceStaging, HostStaging


class PretendedDevice:
    """Copies that take their bytes only when somebody waits for them, as late as a device may: a buffer that is written
    too early is seen as wrong bytes, and one that is waited for without need as an event too many."""

    def __init__(self):
        self.running, self.done = [], []
        self.buffers, self.waits = [], []

    def buffer(self, num_bytes):
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def start(self, source):
        made = torch.full_like(source, 0xEE)
        self.running.append((source, made))
        return made

    def mark(self):
        device, copies = self, list(self.running)

        class Event:
            def synchronize(self):
                passed = [one for one in device.running if any(one is other for other in copies)]
                device.waits.append(len(passed))
                for source, made in passed:
                    made.copy_(source)
                device.running = [one for one in device.running if not any(one is other for other in passed)]

        return Event()

    def finish(self):
        self.mark().synchronize()


def arrays_of(step):
    draw = np.random.default_rng(step)
    return [
        draw.integers(0, 2**40, 5),
        draw.integers(0, 2**30, (3, 7)).astype(np.int32),
        draw.random((2, 1)),
        draw.random(0).astype(np.float32),
        draw.random(9).astype(np.float32),
    ]


def check(sent, arrays):
    for tensor, array in zip(sent, arrays, strict=True):
        assert tensor.shape == array.shape
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert torch.equal(tensor, torch.from_numpy(array))


def test_on_the_host_every_step_has_its_own():
    staging, before = HostStaging(), []
    for step in range(5):
        staging.begin_step()
        arrays = arrays_of(step)
        before.append((staging.send(arrays), arrays))
    for sent, arrays in before:
        check(sent, arrays)
    assert torch.equal(staging.send_integers([(1, 2), (3, 4)]), torch.tensor([[1, 2], [3, 4]]))


def test_nothing_can_be_sent():
    for staging in (HostStaging(), DeviceStaging(PretendedDevice())):
        assert staging.send([]) == []
        sent = staging.send_integers([])
        assert (sent.shape, sent.dtype) == ((0,), torch.int64)
        check(staging.send([np.zeros((0, 3), dtype=np.int32)]), [np.zeros((0, 3), dtype=np.int32)])


def test_no_buffer_is_written_before_its_copies_are_over():
    device = PretendedDevice()
    staging, sent = DeviceStaging(device, 4096), []
    for step in range(7):
        staging.begin_step()
        for part in range(2):
            arrays = arrays_of(10 * step + part)
            sent.append((staging.send(arrays), arrays))
    device.finish()
    for made, arrays in sent:
        check(made, arrays)
    assert len(device.buffers) == NUM_BUFFERS


def test_a_step_waits_for_the_one_before_the_last_alone():
    device = PretendedDevice()
    staging = DeviceStaging(device, 4096)
    for step in range(4):
        staging.begin_step()
        staging.send(arrays_of(step))
        # The last step's copy, and this one's, are on their way: nobody has asked for them.
        assert len(device.running) == min(step + 1, NUM_BUFFERS)
    assert device.waits == [1, 1]  # at the third and the fourth step


def test_copies_of_one_step_share_no_byte():
    device = PretendedDevice()
    staging = DeviceStaging(device, 4096)
    staging.begin_step()
    sent = [(staging.send(arrays), arrays) for arrays in map(arrays_of, range(6))]
    assert device.waits == []
    device.finish()
    for made, arrays in sent:
        check(made, arrays)


def test_a_buffer_that_is_too_small_is_replaced_when_it_is_copied():
    device = PretendedDevice()
    staging = DeviceStaging(device, 64)
    staging.begin_step()
    sent = [(staging.send([array]), [array]) for array in (np.arange(8), np.arange(100), np.arange(4000))]
    device.finish()
    for made, arrays in sent:
        check(made, arrays)
    assert [len(buffer) for buffer in device.buffers[NUM_BUFFERS:]] == [832, 32000]
