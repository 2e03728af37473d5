"""GenEval's words: its 80 classes, in the order of COCO's, and its ten colours.

Three classes have names of their own (computer mouse, tv remote, computer keyboard), so a detector
of COCO's classes is read by index and never by name.
"""

OBJECTS = (
    *("person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat"),
    *("traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat"),
    *("dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack"),
    *("umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball"),
    *("kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket"),
    *("bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple"),
    *("sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair"),
    *("couch", "potted plant", "bed", "dining table", "toilet", "tv", "laptop"),
    *("computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven"),
    *("toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear"),
    *("hair drier", "toothbrush"),
)
COLOURS = (
    *("red", "orange", "yellow", "green", "blue"),
    *("purple", "pink", "brown", "black", "white"),
)
