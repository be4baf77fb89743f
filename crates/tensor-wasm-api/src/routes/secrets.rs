//! Secrets of a function: set, list by name, delete. A value goes in and never comes out; see
//! `tensor-wasm-exec/src/catalog/secrets.rs`.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use tensor_wasm_exec::catalog::{Secret, secrets};

use crate::body;
use crate::error::{ApiError, internal};
use crate::extract::Path;
use crate::gateway::{Shared, audited, empty};

/// Sets a secret to the request's body, which is UTF-8. Not JSON: complaints about JSON quote it.
#[utoipa::path(put, path = "/functions/{f}/secrets/{key}",
    params(("f" = String, Path, description = "name or id"),
           ("key" = String, Path, description = "the environment variable it becomes")),
    request_body(content = String, content_type = "application/octet-stream"),
    responses((status = 204), (status = 400), (status = 404), (status = 409), (status = 413)))]
pub(crate) async fn set(
    State(gateway): State<Shared>,
    Path((f, key)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        let bytes_max = gateway.runtime.config.limits_of(&tenant).secret_bytes_max;
        let body = body::read(&gateway, &tenant, body, bytes_max).await.map_err(as_secret)?;
        let value = Secret::new(&body.bytes);
        secrets::wipe(body.bytes);
        let (runtime, tenant, f, key, value) =
            (gateway.runtime.clone(), tenant.clone(), f.clone(), key.clone(), value?);
        let work = async move { runtime.set_secret(&tenant, &f, &key, value).await };
        gateway.runtime.background().spawn(work).await.map_err(internal)??;
        Ok(empty(StatusCode::NO_CONTENT))
    };
    audited("secret.set", &tenant, &format!("{f}/{key}"), result.await)
}

/// Names only.
#[utoipa::path(get, path = "/functions/{f}/secrets", params(("f" = String, Path, description = "name or id")),
    responses((status = 200, body = Vec<String>), (status = 404)))]
pub(crate) async fn list(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Vec<String>>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let function = gateway.runtime.catalog.resolve(&tenant, &f)?;
    Ok(Json(function.secret_names.iter().cloned().collect()))
}

#[utoipa::path(delete, path = "/functions/{f}/secrets/{key}",
    params(("f" = String, Path, description = "name or id"), ("key" = String, Path, description = "the secret's name")),
    responses((status = 204), (status = 404)))]
pub(crate) async fn delete(
    State(gateway): State<Shared>,
    Path((f, key)): Path<(String, String)>,
    headers: HeaderMap,
) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let (runtime, owner, function, name) = (gateway.runtime.clone(), tenant.clone(), f.clone(), key.clone());
    let work = async move { runtime.delete_secret(&owner, &function, &name).await };
    let result = match gateway.runtime.background().spawn(work).await {
        Ok(Ok(())) => Ok(empty(StatusCode::NO_CONTENT)),
        Ok(Err(rejection)) => Err(rejection.into()),
        Err(e) => Err(internal(e)),
    };
    audited("secret.delete", &tenant, &format!("{f}/{key}"), result)
}

/// The body is a secret's value, so the error names that limit.
fn as_secret(mut error: ApiError) -> ApiError {
    if error.kind == "body_too_large" {
        error.message.push_str(" ([limits] secret_bytes_max)");
    }
    error
}
