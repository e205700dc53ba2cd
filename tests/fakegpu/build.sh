#!/usr/bin/env bash
# Build the fake GPU in a folder:  build.sh FOLDER PYTHON [VERSION]
# PYTHON is the interpreter that will use it, and VERSION the one of a requirements-VERSION.txt
# (default: requirements.txt). It needs gcc, binutils and 1.4 GB of disk.
# A second run on the same folder downloads nothing and compiles the library again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
python=$2
requirements=$here/requirements${3:+-$3}.txt

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "error: the fake GPU needs Linux on x86-64, this is $(uname -sm)" >&2
    exit 1
fi
for tool in gcc nm readelf; do
    if ! command -v $tool > /dev/null; then
        echo "error: the fake GPU needs $tool (Debian: apt-get install gcc libc6-dev binutils)" >&2
        exit 1
    fi
done

if [ ! -e "$folder/.installed" ]; then
    rm -rf "$folder/torch" "$folder/headers"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary=:all: --target "$folder/torch" -r "$requirements"
    # The real libcudart lies beside the headers, where torch would find it.
    mv "$folder/torch/nvidia" "$folder/headers"
    # Every process that imports torch on fake GPUs gets the operators.
    cat >> "$folder/torch/torch/__init__.py" <<'END'

if __import__("os").environ.get("FAKE_GPUS"):
    import fakeops  # noqa: F401
END
    touch "$folder/.installed"
fi

cp "$here/fakeops.py" "$folder/torch"
rm -rf "$folder/build" "$folder/lib"
mkdir "$folder/build" "$folder/lib"
torch=$folder/torch/torch/lib
compile=(gcc -O2 -fPIC -Wall)
for source in cuda nccl; do
    "${compile[@]}" -I"$folder/headers/cu13/include" -c "$here/$source.c" -o "$folder/build/$source.o"
done
"$python" "$here/make_stubs.py" "$torch" "$folder"/build/*.o > "$folder/build/stubs.c"
"${compile[@]}" -c "$folder/build/stubs.c" -o "$folder/build/stubs.o"
gcc -shared -Wl,-soname,libfakecuda.so "$folder"/build/*.o -o "$folder/lib/libfakecuda.so" \
    -lpthread -lrt

# The loader wants a file for each NVIDIA library by name; the functions are all in libfakecuda.so.
# libcuda.so.1 names it as a dependency, since torch looks up functions through that handle.
for name in $(readelf -d "$torch"/*.so | grep -oP 'NEEDED.*\[\Klib(cu|nccl|nv)[^]]*' | sort -u); do
    needs=()
    [ "$name" = libcuda.so.1 ] && needs=(-Wl,--no-as-needed -L"$folder/lib" -lfakecuda)
    gcc -shared -fPIC -Wl,-soname,"$name" -x c /dev/null -x none "${needs[@]}" \
        -o "$folder/lib/$name"
done
