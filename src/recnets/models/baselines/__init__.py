"""The networks of the paper's Table 3 in their CIFAR forms; importing this registers them."""

# The order of registration is the order of the table.
# isort: off
from recnets.models.baselines.googlenet import GoogLeNet
from recnets.models.baselines.resnet import ResNet
from recnets.models.baselines.wrn import WideResNet
from recnets.models.baselines.mobilenet import MobileNet
from recnets.models.baselines.resnext import ResNeXt
from recnets.models.baselines.pyramidnet import PyramidNet
from recnets.models.baselines.densenet import DenseNet
# isort: on

__all__ = ["DenseNet", "GoogLeNet", "MobileNet", "PyramidNet", "ResNeXt", "ResNet", "WideResNet"]
