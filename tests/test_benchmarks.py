import math

from benchmarks.resnet50 import shapes


def test_resnet50_has_its_published_number_of_parameters():
    # keras.applications.ResNet50 has biases before normalisation; torchvision's count is without.
    assert sum(map(math.prod, shapes())) == 25_557_032
    assert len(shapes()) == 161
