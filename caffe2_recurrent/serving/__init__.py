"""Keeping a trained net: the part that predicts, and a file from which another process can run it.

net -> prediction_net -> Caffe2's PredictorExportMeta -> save_predictor -> file
"""

from caffe2_recurrent.serving.prediction import Prediction, prediction_net
from caffe2_recurrent.serving.predictor_file import save_predictor

__all__ = ["Prediction", "prediction_net", "save_predictor"]
