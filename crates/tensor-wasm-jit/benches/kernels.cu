// The same kernels as guests/kernels, by hand: what a fenced kernel is compared with.
extern "C" __global__ void empty() {}

extern "C" __global__ void saxpy(int n, float a, const float *x, float *y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaf(a, x[i], y[i]);
}

extern "C" __global__ void stencil(int width, int height, const float *from, float *to) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x > 0 && y > 0 && x < width - 1 && y < height - 1) {
        int at = y * width + x;
        float sum = from[at - 1] + from[at + 1] + from[at - width] + from[at + width];
        to[at] = fmaf(0.1f, sum - 4.0f * from[at], from[at]);
    }
}

extern "C" __global__ void matmul(int n, const float *a, const float *b, float *c) {
    int col = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y * blockDim.y + threadIdx.y;
    if (col >= n || row >= n) return;
    float sum = 0;
    for (int k = 0; k < n; k++) sum = fmaf(a[row * n + k], b[k * n + col], sum);
    c[row * n + col] = sum;
}

#define TILE 16
extern "C" __global__ void matmul_tiled(int n, const float *a, const float *b, float *c) {
    __shared__ float ta[TILE][TILE], tb[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    float sum = 0;
    for (int t = 0; t < n; t += TILE) {
        ta[y][x] = a[row * n + t + x];
        tb[y][x] = b[(t + y) * n + col];
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum = fmaf(ta[y][k], tb[k][x], sum);
        __syncthreads();
    }
    c[row * n + col] = sum;
}

extern "C" __global__ void nbody(int n, const float4 *bodies, float4 *out) {
    __shared__ float4 tile[256];
    int i = blockIdx.x * blockDim.x + threadIdx.x, own = threadIdx.x;
    float4 me = bodies[i];
    float ax = 0, ay = 0, az = 0;
    for (int base = 0; base < n; base += 256) {
        tile[own] = bodies[base + own];
        __syncthreads();
        for (int j = 0; j < 256; j++) {
            float4 other = tile[j];
            float dx = other.x - me.x, dy = other.y - me.y, dz = other.z - me.z;
            float square = fmaf(dx, dx, fmaf(dy, dy, fmaf(dz, dz, 1e-3f)));
            float inverse = rsqrtf(square);
            float s = other.w * (inverse * inverse * inverse);
            ax = fmaf(s, dx, ax);
            ay = fmaf(s, dy, ay);
            az = fmaf(s, dz, az);
        }
        __syncthreads();
    }
    out[i] = make_float4(ax, ay, az, 0);
}

extern "C" __global__ void spmv(int rows, const int *starts, const int *columns, const float *values, const float *x, float *y) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int at = starts[row]; at < starts[row + 1]; at++) sum = fmaf(values[at], x[columns[at]], sum);
    y[row] = sum;
}

extern "C" __global__ void probe(int n, int mask, const unsigned *keys, const uint2 *table, unsigned *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned key = keys[i], at = key * 2654435761u & mask, found;
    for (;;) {
        uint2 own = table[at];
        if (own.x == key) { found = own.y; break; }
        if (own.x == 0) { found = 0; break; }
        at = (at + 1) & mask;
    }
    out[i] = found;
}
