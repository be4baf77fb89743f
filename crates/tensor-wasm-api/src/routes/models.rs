//! Models: add, list, show, remove. They are safetensors files that functions open by name; see
//! `tensor-wasm-exec/src/models`.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use http_body::Body as _;
use serde::{Deserialize, Serialize};
use tensor_wasm_exec::catalog::ModelRecord;
use tensor_wasm_exec::catalog::upload::UploadKind;
use utoipa::ToSchema;

use crate::error::{ApiError, internal};
use crate::extract::{Path, Query};
use crate::gateway::{Shared, audited, empty};
use crate::upload;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelView {
    name: String,
    tenant: String,
    /// The BLAKE3 hash of its bytes.
    hash: String,
    bytes: u64,
    /// How many are in it.
    tensors: usize,
    /// When it was added.
    created_ms: u64,
    /// Why it cannot be used, if it was found damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<String>,
}

/// A model and who uses it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelDetail {
    #[serde(flatten)]
    model: ModelView,
    /// Functions with a serving revision that names it.
    functions: Vec<String>,
}

impl From<&ModelRecord> for ModelView {
    fn from(model: &ModelRecord) -> ModelView {
        let ModelRecord { id: _, tenant, name, hash, bytes, tensors, created_ms, quarantined } = model.clone();
        ModelView { name, tenant, hash: hash.as_str().to_owned(), bytes, tensors, created_ms, quarantined }
    }
}

/// Adds a model, or another file under the name of one: 201 or 200.
#[utoipa::path(put, path = "/models/{name}",
    params(("name" = String, Path, description = "what functions open it by")),
    request_body(content = String, content_type = "application/octet-stream", description = "a safetensors file"),
    responses((status = 200, body = ModelView), (status = 201, body = ModelView),
              (status = 400), (status = 408), (status = 409), (status = 413)))]
pub(crate) async fn add(
    State(gateway): State<Shared>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        // Before gigabytes are sent for nothing.
        gateway.runtime.check_model_room(&tenant, &name, body.size_hint().lower())?;
        let (upload, share) = upload::receive(&gateway, &tenant, body, UploadKind::Model).await?;
        let (runtime, tenant, name) = (gateway.runtime.clone(), tenant.clone(), name.clone());
        // Not on this thread: it reads and syncs files. Not tied to this connection either.
        let work = async move {
            let added = runtime.add_model(&tenant, &name, upload).await;
            drop(share);
            added
        };
        let added = gateway.runtime.background().spawn(work).await.map_err(internal)??;
        let status = if added.replaced.is_some() { StatusCode::OK } else { StatusCode::CREATED };
        Ok((status, Json(ModelView::from(&*added.model))).into_response())
    };
    audited("model.add", &tenant, &name, result.await)
}

#[utoipa::path(get, path = "/models", responses((status = 200, body = Vec<ModelView>)))]
pub(crate) async fn list(State(gateway): State<Shared>, headers: HeaderMap) -> Result<Json<Vec<ModelView>>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    Ok(Json(gateway.runtime.catalog.models(&tenant).iter().map(|model| ModelView::from(&**model)).collect()))
}

#[utoipa::path(get, path = "/models/{name}", params(("name" = String, Path, description = "the model's name")),
    responses((status = 200, body = ModelDetail), (status = 404)))]
pub(crate) async fn show(
    State(gateway): State<Shared>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<ModelDetail>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let model = gateway.runtime.catalog.model(&tenant, &name)?;
    let users = gateway.runtime.catalog.users_of_model(&tenant, &name);
    let functions = users.iter().map(|function| function.name.clone()).collect();
    Ok(Json(ModelDetail { model: ModelView::from(&*model), functions }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemoveQuery {
    #[serde(default)]
    force: bool,
}

/// Removes a model. One that a serving revision names only with `force`.
#[utoipa::path(delete, path = "/models/{name}",
    params(("name" = String, Path, description = "the model's name"),
           ("force" = Option<bool>, Query, description = "also where functions use it")),
    responses((status = 204), (status = 404), (status = 409)))]
pub(crate) async fn remove(
    State(gateway): State<Shared>,
    Path(name): Path<String>,
    query: Result<Query<RemoveQuery>, ApiError>,
    headers: HeaderMap,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        let Query(RemoveQuery { force }) = query?;
        let (runtime, tenant, name) = (gateway.runtime.clone(), tenant.clone(), name.clone());
        let work = async move { runtime.remove_model(&tenant, &name, force).await };
        gateway.runtime.background().spawn(work).await.map_err(internal)??;
        Ok(empty(StatusCode::NO_CONTENT))
    };
    audited("model.remove", &tenant, &name, result.await)
}
