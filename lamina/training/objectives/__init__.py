"""The training objectives of text models. A model's heads decide which objectives fit."""
