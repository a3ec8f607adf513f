/* The decoder stack around the matmuls and attention; included once per instruction set. */

/* out = x / sqrt(mean(x^2) + eps) * weight; in place when out == x. */
static void ISA(rms_norm_row)(const float *x, const float *weight, int64_t size, float eps,
                              float *out)
{
    v8f squares = {0};
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        v8f v = ISA(load)(x + i);
        squares = v * v + squares;
    }
    for (; i < size; i++)
        rest += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf((ISA(sum8)(squares) + rest) / (float)size + eps);
    for (i = 0; i + 8 <= size; i += 8)
        ISA(store)(out + i, ISA(load)(x + i) * scale * ISA(load)(weight + i));
    for (; i < size; i++)
        out[i] = x[i] * scale * weight[i];
}

static void ISA(rms_norm)(const float *x, const float *weight, int64_t rows, int64_t size,
                          float eps, float *out)
{
    for (int64_t r = 0; r < rows; r++)
        ISA(rms_norm_row)(x + r * size, weight, size, eps, out + r * size);
}

/* Rotate the pairs (i, i + half) of one head; out may be x. */
static void ISA(rotate)(const float *x, const float *cos, const float *sin, int64_t half,
                        float *out)
{
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        v8f low = ISA(load)(x + i), high = ISA(load)(x + half + i);
        v8f c = ISA(load)(cos + i), s = ISA(load)(sin + i);
        ISA(store)(out + i, low * c - high * s);
        ISA(store)(out + half + i, high * c + low * s);
    }
    for (; i < half; i++) {
        float low = x[i], high = x[half + i];
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

/* Norm and rotate queries in place, keys into the cache; copy values into the cache. */
static void ISA(prepare_heads)(const decoder_model *model, const decoder_layer *layer,
                               const ragged_batch *batch, const decoder_cache *cache, float *qkv,
                               float *queries, float *keys, float *values)
{
    int64_t dim = model->head_dim, kv_size = model->kv_heads * dim, half = dim / 2;
    int64_t width = layer->qkv.panels * PANEL, q_size = model->heads * dim;
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        const float *cos = cache->cos + batch->positions[t] * half;
        const float *sin = cache->sin + batch->positions[t] * half;
        float *row = qkv + t * width, *key = keys + batch->kv_slots[t] * kv_size;
        for (int64_t h = 0; h < model->heads + model->kv_heads; h++) {
            const float *norm = h < model->heads ? layer->q_norm : layer->k_norm;
            float *x = row + h * dim;
            if (norm)
                ISA(rms_norm_row)(x, norm, dim, model->eps, x);
            ISA(rotate)(x, cos, sin, half,
                        h < model->heads ? queries + t * q_size + h * dim
                                         : key + (h - model->heads) * dim);
        }
        __builtin_memcpy(values + batch->kv_slots[t] * kv_size, row + q_size + kv_size,
                         (size_t)kv_size * sizeof(float));
    }
}

static float ISA(element)(const void *data, int64_t index, int is_float32)
{
    if (is_float32)
        return ((const float *)data)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

/* Embedding rows; a tied embedding is read back from the panels of the head. */
static void ISA(embed)(const decoder_model *model, const int64_t *ids, int64_t rows, float *out)
{
    const packed_matrix *head = &model->lm_head;
    for (int64_t t = 0; t < rows; t++, out += model->hidden) {
        if (model->embed) {
            for (int64_t k = 0; k < model->hidden; k++)
                out[k] = ISA(element)(model->embed, ids[t] * model->hidden + k,
                                      model->embed_is_float32);
            continue;
        }
        int64_t column = ids[t] % PANEL, base = ids[t] / PANEL * PANEL * head->k;
        if (head->type == WEIGHTS_BF16)
            column = column % 8 * 2 + column / 8;
        for (int64_t k = 0; k < model->hidden; k++)
            out[k] = ISA(element)(head->data, base + k * PANEL + column, head->type == WEIGHTS_F32);
    }
}

/* Rows [a; b] of two matrices [rows, size]; either may be normed on the way. */
static void ISA(join)(const float *a, const float *a_norm, const float *b, const float *b_norm,
                      int64_t rows, int64_t size, float eps, float *out)
{
    for (int64_t t = 0; t < rows; t++, a += size, b += size, out += 2 * size) {
        if (a_norm)
            ISA(rms_norm_row)(a, a_norm, size, eps, out);
        else
            __builtin_memcpy(out, a, (size_t)size * sizeof(float));
        if (b_norm)
            ISA(rms_norm_row)(b, b_norm, size, eps, out + size);
        else
            __builtin_memcpy(out + size, b, (size_t)size * sizeof(float));
    }
}

/* What the layer's attention takes in, [T, width of qkv]: the stream itself, or in normed. */
static const float *ISA(taken)(const decoder_model *model, const decoder_layer *layer,
                               const decoder_scratch *scratch, int64_t rows)
{
    int64_t hidden = model->hidden;
    if (layer->embed_norm) {
        ISA(join)(scratch->embedded, layer->embed_norm, scratch->stream, layer->input_norm, rows,
                  hidden, model->eps, scratch->normed);
        for (int64_t t = 0; layer->norm_residual && t < rows; t++)
            __builtin_memcpy(scratch->stream + t * hidden, scratch->normed + (2 * t + 1) * hidden,
                             (size_t)hidden * sizeof(float));
        return scratch->normed;
    }
    if (!layer->input_norm)
        return scratch->stream;
    ISA(rms_norm)(scratch->stream, layer->input_norm, rows, hidden, model->eps, scratch->normed);
    return scratch->normed;
}

/* Move the last rows of every sequence, those of `asked`, to the front of a matrix. */
static void ISA(keep_asked)(const ragged_batch *batch, const ragged_batch *asked, int64_t width,
                            float *matrix)
{
    for (int64_t r = 0; r < batch->num_rows; r++) {
        int64_t first = asked->cu_q[r], count = asked->cu_q[r + 1] - first;
        __builtin_memmove(matrix + first * width, matrix + (batch->cu_q[r + 1] - count) * width,
                          (size_t)(count * width) * sizeof(float));
    }
}

/* asked: batch itself, or its rows with only their last tokens, whose stream is then all that is
 * left behind the layer, side by side. */
static void ISA(layer_forward)(const decoder_model *model, const decoder_layer *layer,
                               const ragged_batch *batch, const ragged_batch *asked,
                               const decoder_cache *cache, const decoder_scratch *scratch,
                               int64_t index)
{
    int64_t rows = batch->num_tokens, hidden = model->hidden, dim = model->head_dim;
    int64_t plane = cache->num_slots * model->kv_heads * dim, gated = layer->gate_up.panels * 8;
    float *keys = cache->data + 2 * index * plane, *values = keys + plane;
    float *queries = scratch->normed;
    const float *taken = ISA(taken)(model, layer, scratch, rows);
    ISA(matmul)(&layer->qkv, taken, layer->qkv.k, rows, scratch->qkv, layer->qkv.panels * PANEL,
                EPILOGUE_STORE);
    ISA(prepare_heads)(model, layer, batch, cache, scratch->qkv, queries, keys, values);
    if (asked != batch) {
        ISA(keep_asked)(batch, asked, model->heads * dim, queries);
        ISA(keep_asked)(batch, asked, hidden, scratch->stream);
        rows = asked->num_tokens;
    }
    attention_args args = {queries,        keys,          values,      model->heads,
                                model->kv_heads, dim,           layer->window, model->scale,
                                scratch->context, scratch->states, scratch->visible,
                                scratch->gathered};
    ISA(attention)(&args, asked, scratch->slots);
    ISA(matmul)(&layer->o, scratch->context, model->heads * dim, rows, scratch->stream, hidden,
                EPILOGUE_ADD);
    ISA(rms_norm)(scratch->stream, layer->post_norm, rows, hidden, model->eps, scratch->normed);
    ISA(matmul)(&layer->gate_up, scratch->normed, hidden, rows, scratch->gated, gated,
                EPILOGUE_SILU_MUL);
    ISA(matmul)(&layer->down, scratch->gated, gated, rows, scratch->stream, hidden, EPILOGUE_ADD);
}

/* captured: [T, num_capture, hidden], the streams that enter the layers of `capture`. */
static void ISA(decoder_forward)(const decoder_model *model, const ragged_batch *batch,
                                 const decoder_cache *cache, const decoder_scratch *scratch,
                                 const int64_t *capture, int64_t num_capture, float *captured,
                                 float *hidden)
{
    int64_t next = 0, size = model->hidden;
    ISA(embed)(model, batch->input_ids, batch->num_tokens, scratch->stream);
    for (int64_t i = 0; i <= model->num_layers; i++) {
        if (next < num_capture && capture[next] == i) {
            for (int64_t t = 0; t < batch->num_tokens; t++)
                __builtin_memcpy(captured + (t * num_capture + next) * size,
                                 scratch->stream + t * size, (size_t)size * sizeof(float));
            next++;
        }
        if (i < model->num_layers)
            ISA(layer_forward)(model, &model->layers[i], batch, batch, cache, scratch, i);
    }
    ISA(rms_norm)(scratch->stream, model->final_norm, batch->num_tokens, model->hidden, model->eps,
                  hidden);
}

/* A draft's pass from hidden [T, hidden]. Stream and normed stream of the tokens that are asked for
 * (see layer_forward) go where there is room for them: recurrent and head_input [T, hidden] may be
 * NULL, and recurrent may be hidden. */
static void ISA(draft_forward)(const decoder_model *model, const ragged_batch *batch,
                               const ragged_batch *asked, const decoder_cache *cache,
                               const decoder_scratch *scratch, const float *hidden,
                               float *recurrent, float *head_input)
{
    int64_t rows = batch->num_tokens, size = model->hidden, last = model->num_layers - 1;
    size_t bytes = (size_t)(rows * size) * sizeof(float);
    ISA(embed)(model, batch->input_ids, rows, scratch->embedded);
    if (model->fuse.data) {
        ISA(join)(scratch->embedded, NULL, hidden, NULL, rows, size, 0.0f, scratch->normed);
        ISA(matmul)(&model->fuse, scratch->normed, 2 * size, rows, scratch->stream, size,
                    EPILOGUE_STORE);
    } else {
        __builtin_memcpy(scratch->stream, hidden, bytes);
    }
    for (int64_t i = 0; i <= last; i++)
        ISA(layer_forward)(model, &model->layers[i], batch, i < last ? batch : asked, cache,
                           scratch, i);
    for (int64_t r = 0; r < batch->num_rows; r++) {
        int64_t count = asked->cu_q[r + 1] - asked->cu_q[r];
        int64_t place = (batch->cu_q[r + 1] - count) * size;
        const float *stream = scratch->stream + asked->cu_q[r] * size;
        if (recurrent)
            __builtin_memcpy(recurrent + place, stream, (size_t)(count * size) * sizeof(float));
        if (head_input)
            ISA(rms_norm)(stream, model->final_norm, count, size, model->eps, head_input + place);
    }
}
