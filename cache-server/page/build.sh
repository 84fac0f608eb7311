#!/usr/bin/env bash
# Copies what the admin page takes from npm to a folder: build.sh NODE_MODULES FOLDER
#
# tests/install.sh fills NODE_MODULES with the packages of package-lock.json, which has their hashes. A test
# compares the result with vendor/, which the server embeds; `make page` renews vendor/.
set -euo pipefail
from="$1/uplot" to="$2"
mkdir -p "$to"
cp "$from/dist/uPlot.iife.min.js" "$to/uPlot.js"
cp "$from/dist/uPlot.min.css" "$to/uPlot.css"
cp "$from/LICENSE" "$to/LICENSE"
chmod 644 "$to"/uPlot.js "$to"/uPlot.css "$to"/LICENSE
