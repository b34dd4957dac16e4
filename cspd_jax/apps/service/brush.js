// The page's brush: a picture of the model's size, and the tokens of it that are painted over, to be made anew.
window.cspdBrush = (() => {
  let picture = null; // a canvas of the model's size
  let painted = new Set(); // of tokens, by number
  let erasing = null; // while the pointer is down: whether painted tokens become kept ones

  const board = () => document.querySelector("#cspd-board");
  const blank = () => Object.assign(document.createElement("canvas"), { width: board().width, height: board().height });

  function paint(context, colour, chosen) {
    const side = Number(board().dataset.side);
    const columns = board().width / side;
    context.fillStyle = colour;
    for (const token of chosen) {
      context.fillRect((token % columns) * side, Math.floor(token / columns) * side, side, side);
    }
  }

  function show() {
    const context = board().getContext("2d");
    context.clearRect(0, 0, board().width, board().height);
    if (picture === null) return;
    context.drawImage(picture, 0, 0);
    paint(context, "rgba(224, 130, 20, 0.75)", painted);
  }

  function take(source) {
    const image = new Image();
    image.onload = () => {
      picture = blank();
      const context = picture.getContext("2d");
      context.fillStyle = "white"; // behind what is transparent
      context.fillRect(0, 0, picture.width, picture.height);
      context.drawImage(image, 0, 0, picture.width, picture.height);
      painted = new Set();
      show();
    };
    image.src = source;
  }

  function stroke(event) {
    const canvas = board(), area = canvas.getBoundingClientRect(), side = Number(canvas.dataset.side);
    const columns = canvas.width / side, rows = canvas.height / side;
    const reach = Number(document.querySelector("#cspd-reach").value) - 1;
    const column = Math.floor(((event.clientX - area.left) / area.width) * columns);
    const row = Math.floor(((event.clientY - area.top) / area.height) * rows);
    if (erasing === null) erasing = painted.has(row * columns + column);
    for (let r = Math.max(0, row - reach); r <= Math.min(rows - 1, row + reach); r++) {
      for (let c = Math.max(0, column - reach); c <= Math.min(columns - 1, column + reach); c++) {
        if (erasing) painted.delete(r * columns + c);
        else painted.add(r * columns + c);
      }
    }
    show();
  }

  document.addEventListener("pointerdown", (event) => {
    if (event.target.id === "cspd-board" && picture !== null) {
      event.preventDefault();
      stroke(event);
    }
  });
  document.addEventListener("pointermove", (event) => {
    if (erasing !== null) stroke(event);
  });
  document.addEventListener("pointerup", () => (erasing = null));
  document.addEventListener("change", (event) => {
    if (event.target.id !== "cspd-file" || !event.target.files.length) return;
    const reader = new FileReader();
    reader.onload = () => take(reader.result);
    reader.readAsDataURL(event.target.files[0]);
    event.target.value = "";
  });
  document.addEventListener("click", (event) => {
    if (event.target.id === "cspd-last") {
      const made = document.querySelector(".cspd img");
      if (made !== null) take(made.src);
    }
    if (event.target.id === "cspd-whole") {
      picture = null;
      show();
    }
  });

  // What is sent: "" without a picture, else the picture and its mask, in base64.
  function drawn() {
    if (board() === null || picture === null) return "";
    const mask = blank(), context = mask.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, mask.width, mask.height);
    paint(context, "black", painted);
    const file = (canvas) => canvas.toDataURL("image/png").split(",")[1];
    return JSON.stringify({ image: file(picture), mask: file(mask) });
  }
  return { drawn };
})();
