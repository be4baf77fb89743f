//! Functions: deploy, list, show, revisions, rollback, traffic, delete.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::engine::general_purpose::STANDARD as BASE64;
use base64::read::DecoderReader;
use http::{HeaderMap, StatusCode, header};
use serde::{Deserialize, Serialize};
use tensor_wasm_exec::catalog::upload::UploadKind;
use tensor_wasm_exec::catalog::{FunctionRecord, MemoryKind, RevisionRecord, Settings, SettingsPatch, Traffic};
use tensor_wasm_exec::engine::compile::CompileCost;
use tensor_wasm_exec::guest::signature::ExportSignature;
use utoipa::ToSchema;

use crate::error::{ApiError, internal};
use crate::extract::{Path, Query, whole};
use crate::gateway::{Gateway, ServedRevision, Shared, audited, empty};
use crate::hosts::Asked;
use crate::{body, upload};

/// Base64 and JSON around a module: its size on the wire is up to this many times its own, plus the rest of the object.
const BASE64_GROWTH: f64 = 1.37;
const JSON_SLACK_BYTES: usize = 64 << 10;

/// The largest module that is taken as base64 in JSON: the request's body is held in memory until the module is on
/// disk. Larger ones are sent as they are, which streams them there.
const JSON_MODULE_BYTES_MAX: usize = 64 << 20;

/// Text with escapes cannot be read in place: the parser collects it once, and the request has a copy of that.
const ESCAPED_COPIES: usize = 2;

/// Base64 is decoded in pieces of so many bytes, so that the module is never in memory as a whole.
const DECODED_PIECE_BYTES: usize = 64 << 10;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeployRequest<'a> {
    name: String,
    /// The module or component, base64.
    #[serde(borrow)]
    #[schema(value_type = String)]
    wasm_b64: Cow<'a, str>,
    #[serde(default, deserialize_with = "settings_object")]
    settings: SettingsRequest,
}

/// Settings from an object and nothing else: serde would take a list for a struct, its fields in order.
fn settings_object<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<SettingsRequest, D::Error> {
    let object = serde_json::Map::deserialize(deserializer)?;
    SettingsRequest::deserialize(serde_json::Value::Object(object)).map_err(serde::de::Error::custom)
}

/// What changes in the function's settings, as a JSON merge patch (RFC 7396): what is absent stays as in the serving
/// revision, what is null goes back to its default, and so does each variable in `env`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SettingsRequest {
    /// Keep instances and call them again: the author promises that calls leave nothing behind.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<bool>)]
    reuse: Option<Option<bool>>,
    /// Answer callers without a token.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<bool>)]
    public: Option<Option<bool>>,
    /// A tighter deadline than the tenant's, which is the default.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<u64>)]
    deadline_ms: Option<Option<u64>>,
    /// A tighter memory limit than the tenant's, which is the default.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<u64>)]
    memory_bytes: Option<Option<u64>>,
    /// Environment variables to set, or with null to unset. Null instead of an object: all of them.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<BTreeMap<String, Option<String>>>)]
    env: Option<Option<BTreeMap<String, Option<String>>>>,
    /// Let it use the GPU.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<bool>)]
    gpu: Option<Option<bool>>,
    /// `pinned`: the device sees the linear memory of a core module in place.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<MemoryView>)]
    memory: Option<Option<MemoryView>>,
    /// The models that it may open, all of them.
    #[serde(deserialize_with = "mentioned")]
    #[schema(value_type = Option<Vec<String>>)]
    models: Option<Option<BTreeSet<String>>>,
}

/// Called only for a field that is there: null is `Some(None)`, absence stays `None`.
fn mentioned<'de, D, T>(field: D) -> Result<Option<Option<T>>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(field).map(Some)
}

/// A revision's settings; what is not there has its default.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct SettingsView {
    /// Keep instances and call them again: the author promises that calls leave nothing behind.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    reuse: bool,
    /// Answer callers without a token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    public: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    deadline_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    /// Let it use the GPU.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    gpu: bool,
    /// `pinned`: the device sees the linear memory of a core module in place.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<MemoryView>,
    /// The models that it may open.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<String>)]
    models: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum MemoryView {
    Pooled,
    Pinned,
}

impl From<SettingsRequest> for SettingsPatch {
    fn from(request: SettingsRequest) -> SettingsPatch {
        let SettingsRequest { reuse, public, deadline_ms, memory_bytes, env, gpu, memory, models } = request;
        let kind = |memory: Option<MemoryView>| match memory {
            Some(MemoryView::Pinned) => MemoryKind::Pinned,
            Some(MemoryView::Pooled) | None => MemoryKind::Pooled,
        };
        SettingsPatch {
            reuse: reuse.map(Option::unwrap_or_default),
            public: public.map(Option::unwrap_or_default),
            gpu: gpu.map(Option::unwrap_or_default),
            memory: memory.map(kind),
            models: models.map(Option::unwrap_or_default),
            deadline_ms,
            memory_bytes,
            clears_env: matches!(env, Some(None)),
            env: env.flatten().unwrap_or_default(),
        }
    }
}

impl From<&Settings> for SettingsView {
    fn from(settings: &Settings) -> SettingsView {
        let Settings { reuse, public, deadline_ms, memory_bytes, env, gpu, memory, models } = settings.clone();
        let memory = (memory == MemoryKind::Pinned).then_some(MemoryView::Pinned);
        SettingsView { reuse, public, deadline_ms, memory_bytes, env, gpu, memory, models }
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FunctionView {
    id: String,
    name: String,
    tenant: String,
    /// The revision that gets (most of) the traffic: a hash over its bytes and its settings.
    revision: Option<String>,
    kind: Option<&'static str>,
    created_ms: u64,
    traffic: Vec<ShareView>,
    /// The path of its HTTP endpoint, for `wasi:http` handlers and programs that call them.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    /// Where a browser opens it: a URL with a host of its own, wherever there can be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
}

/// A function as it stands after a deploy.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeployedView {
    #[serde(flatten)]
    function: FunctionView,
    /// What compiling took; absent where the same bytes had been compiled before.
    #[serde(skip_serializing_if = "Option::is_none")]
    compiled: Option<CompiledView>,
}

#[derive(Debug, Serialize, ToSchema)]
struct CompiledView {
    wall_ms: u64,
    /// On all cores together.
    cpu_ms: u64,
}

/// Everything there is to know about one function.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct FunctionDetail {
    #[serde(flatten)]
    function: FunctionView,
    /// How many revisions are kept.
    revisions: usize,
    /// Those of the serving revision.
    settings: SettingsView,
    /// What the serving revision exports, at most a thousand of them.
    exports: Vec<ExportView>,
    /// Names only.
    secrets: Vec<String>,
    /// Why its exports could not be listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    unavailable: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ExportView {
    name: String,
    params: Vec<ParamView>,
    /// Types, as in WIT or core Wasm.
    results: Vec<String>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ParamView {
    name: String,
    #[serde(rename = "type")]
    ty: String,
}

impl From<ExportSignature> for ExportView {
    fn from(ExportSignature { name, params, results }: ExportSignature) -> ExportView {
        ExportView { name, params: params.into_iter().map(|(name, ty)| ParamView { name, ty }).collect(), results }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShareView {
    revision: String,
    #[serde(deserialize_with = "whole")]
    weight: u32,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RevisionView {
    revision: String,
    /// The BLAKE3 hash of its bytes.
    source: String,
    kind: &'static str,
    bytes: u64,
    created_ms: u64,
    /// Its share of the traffic in percent.
    traffic_percent: f64,
    settings: SettingsView,
    /// Why it cannot be served, if it was found damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<String>,
}

impl FunctionView {
    /// `headers` are those of the request: an address is one that works for whoever asks.
    fn of(function: &FunctionRecord, gateway: &Gateway, headers: &HeaderMap) -> FunctionView {
        let current = function.current();
        let kind = current.map(|r| r.kind.as_str());
        let is_handler = kind == Some("http_handler");
        let address = || gateway.hosts.address(&function.tenant, &function.name, &Asked::of(headers));
        FunctionView {
            id: function.id.clone(),
            name: function.name.clone(),
            tenant: function.tenant.clone(),
            revision: current.map(|r| r.revision.as_str().to_owned()),
            kind,
            created_ms: function.created_ms,
            traffic: shares(function),
            url: is_handler.then(|| format!("/run/{}/", function.name)),
            address: is_handler.then(address),
        }
    }

    /// The answer to a change, with the revision for the audit log.
    fn answer(self, status: StatusCode) -> Response {
        let revision = ServedRevision(self.revision.clone().unwrap_or_default());
        let mut response = (status, Json(self)).into_response();
        response.extensions_mut().insert(revision);
        response
    }
}

fn shares(function: &FunctionRecord) -> Vec<ShareView> {
    let view =
        |s: &tensor_wasm_exec::catalog::Share| ShareView { revision: s.revision.as_str().to_owned(), weight: s.weight };
    function.traffic.iter().map(view).collect()
}

fn revision_view(function: &FunctionRecord, revision: &RevisionRecord) -> RevisionView {
    let weight = |s: &tensor_wasm_exec::catalog::Share| u64::from(s.weight);
    let total: u64 = function.traffic.iter().map(weight).sum();
    let own: u64 = function.traffic.iter().filter(|s| s.revision == revision.revision).map(weight).sum();
    RevisionView {
        revision: revision.revision.as_str().to_owned(),
        source: revision.source.as_str().to_owned(),
        kind: revision.kind.as_str(),
        bytes: revision.bytes,
        created_ms: revision.created_ms,
        traffic_percent: if total == 0 { 0.0 } else { own as f64 * 100.0 / total as f64 },
        settings: (&revision.settings).into(),
        quarantined: revision.quarantined.clone(),
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeployQuery {
    name: Option<String>,
    /// JSON of [`SettingsRequest`].
    settings: Option<String>,
}

/// Deploys a function: JSON with the module in base64, or the module itself as `application/wasm` with `?name=`.
#[utoipa::path(post, path = "/functions", request_body = DeployRequest<'_>,
    params(("name" = Option<String>, Query, description = "with an application/wasm body"),
           ("settings" = Option<String>, Query, description = "JSON object, with an application/wasm body")),
    responses((status = 201, body = DeployedView), (status = 400), (status = 408), (status = 413)))]
pub(crate) async fn deploy(
    State(gateway): State<Shared>,
    query: Result<Query<DeployQuery>, ApiError>,
    request: Request,
) -> Response {
    let (parts, body) = request.into_parts();
    let tenant = match gateway.tokens.tenant(&parts.headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let mut name = String::new();
    let result = deploy_for(&gateway, &tenant, query.map(|Query(q)| q), &parts.headers, body, &mut name).await;
    audited("function.deploy", &tenant, &name, result)
}

async fn deploy_for(
    gateway: &Shared,
    tenant: &str,
    query: Result<DeployQuery, ApiError>,
    headers: &HeaderMap,
    body: Body,
    name: &mut String,
) -> Result<Response, ApiError> {
    let is_wasm = headers.get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(b"application/wasm"));
    // What it takes on disk counts until the deploy is over.
    let (wasm, settings, share) = if is_wasm {
        let query = query?;
        *name = query
            .name
            .ok_or_else(|| ApiError::bad_request("invalid_name", "an application/wasm body needs ?name=NAME"))?;
        let settings: SettingsRequest = match query.settings {
            Some(json) => serde_json::from_str(&json)
                .and_then(|object: serde_json::Value| settings_object(object))
                .map_err(|e| ApiError::bad_request("invalid_json", format!("?settings=: {e}")))?,
            None => SettingsRequest::default(),
        };
        let (wasm, share) = upload::receive(gateway, tenant, body, UploadKind::Module).await?;
        (wasm, settings, share)
    } else {
        let bytes_max = grown(gateway.runtime.config.limits_of(tenant).module_bytes_max.min(JSON_MODULE_BYTES_MAX));
        let json = body::read(gateway, tenant, body, bytes_max).await.map_err(as_module)?;
        let copies = if json.bytes.contains(&b'\\') { ESCAPED_COPIES } else { 0 };
        let _copies = gateway.bodies.counted(tenant, json.bytes.len().saturating_mul(copies))?;
        let request: DeployRequest<'_> = serde_json::from_slice(&json.bytes)
            .map_err(|e| ApiError::bad_request("invalid_json", format!("the request body: {e}")))?;
        *name = request.name;
        let share = upload::share(gateway, tenant, base64::decoded_len_estimate(request.wasm_b64.len()))?;
        let mut upload = gateway.runtime.upload(tenant)?;
        let mut decoder = DecoderReader::new(request.wasm_b64.as_bytes(), &BASE64);
        let mut piece = Vec::with_capacity(DECODED_PIECE_BYTES);
        loop {
            piece.clear();
            let read = decoder.by_ref().take(DECODED_PIECE_BYTES as u64).read_to_end(&mut piece);
            if read.map_err(|e| ApiError::bad_request("invalid_base64", format!("wasm_b64: {e}")))? == 0 {
                break;
            }
            upload.write(&piece).await?;
        }
        (upload.finish().await?, request.settings, share)
    };
    let (runtime, tenant, deployed_name) = (gateway.runtime.clone(), tenant.to_owned(), name.clone());
    // Not on this thread: it compiles and syncs files. Not tied to this connection either: once the module is here, a
    // client that leaves does not undo the deploy.
    let work = async move {
        let deployed = runtime.deploy(&tenant, &deployed_name, wasm, settings.into()).await;
        drop(share);
        deployed
    };
    let deployed = gateway.runtime.background().spawn(work).await;
    let deployed = deployed.map_err(internal)??;
    let compiled = deployed.cost.map(|CompileCost { wall_ms, cpu_ms }| CompiledView { wall_ms, cpu_ms });
    let function = FunctionView::of(&deployed.function, gateway, headers);
    let revision = ServedRevision(function.revision.clone().unwrap_or_default());
    let mut response = (StatusCode::CREATED, Json(DeployedView { function, compiled })).into_response();
    response.extensions_mut().insert(revision);
    Ok(response)
}

fn grown(module_bytes_max: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a bound")]
    let encoded = (module_bytes_max as f64 * BASE64_GROWTH) as usize;
    encoded.saturating_add(JSON_SLACK_BYTES)
}

/// A deploy's body is a module, so the error names that limit.
fn as_module(mut error: ApiError) -> ApiError {
    if error.kind == "body_too_large" {
        error.kind = "module_too_large";
        error.message.push_str(" ([limits] module_bytes_max; as application/wasm a module is not held in memory)");
    }
    error
}

#[utoipa::path(get, path = "/functions", responses((status = 200, body = Vec<FunctionView>)))]
pub(crate) async fn list(State(gateway): State<Shared>, headers: HeaderMap) -> Result<Response, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let functions = gateway.runtime.catalog.list(&tenant);
    let functions: Vec<_> = functions.iter().map(|f| FunctionView::of(f, &gateway, &headers)).collect();
    Ok(Json(functions).into_response())
}

#[utoipa::path(get, path = "/functions/{f}", params(("f" = String, Path, description = "name or id")),
    responses((status = 200, body = FunctionDetail), (status = 404)))]
pub(crate) async fn show(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
) -> Result<Json<FunctionDetail>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let function = gateway.runtime.catalog.resolve(&tenant, &f)?;
    // Its exports are in its compiled code, which may have to be loaded first: not on this thread.
    let (runtime, wanted) = (gateway.runtime.clone(), function.clone());
    let exports = gateway.runtime.background().spawn(async move { runtime.exports(&wanted).await });
    let (exports, unavailable) = match exports.await.map_err(internal)? {
        Ok(exports) => (exports.into_iter().map(ExportView::from).collect(), None),
        Err(failure) => (Vec::new(), Some(ApiError::from(failure).message)),
    };
    let settings = function.current().map(|r| (&r.settings).into()).unwrap_or_default();
    Ok(Json(FunctionDetail {
        function: FunctionView::of(&function, &gateway, &headers),
        revisions: function.revisions.len(),
        settings,
        exports,
        secrets: function.secret_names.iter().cloned().collect(),
        unavailable,
    }))
}

#[utoipa::path(get, path = "/functions/{f}/revisions", params(("f" = String, Path, description = "name or id")),
    responses((status = 200, body = Vec<RevisionView>), (status = 404)))]
pub(crate) async fn revisions(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Vec<RevisionView>>, ApiError> {
    let tenant = gateway.tokens.tenant(&headers)?;
    let function = gateway.runtime.catalog.resolve(&tenant, &f)?;
    Ok(Json(function.revisions.iter().rev().map(|r| revision_view(&function, r)).collect()))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RollbackRequest {
    /// A revision or the beginning of one; absent, the one deployed before the current. Its settings come back with it.
    revision: Option<String>,
}

#[utoipa::path(post, path = "/functions/{f}/rollback", params(("f" = String, Path, description = "name or id")),
    request_body = RollbackRequest, responses((status = 200, body = FunctionView), (status = 404), (status = 409)))]
pub(crate) async fn rollback(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    change(&gateway, "function.rollback", &f, &headers, body, |request: RollbackRequest| match request.revision {
        Some(revision) => Traffic::Shares(vec![(revision, 1)]),
        None => Traffic::Previous,
    })
    .await
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrafficRequest {
    /// One revision, or two that share the traffic by weight.
    shares: Vec<ShareView>,
}

#[utoipa::path(put, path = "/functions/{f}/traffic", params(("f" = String, Path, description = "name or id")),
    request_body = TrafficRequest, responses((status = 200, body = FunctionView), (status = 404), (status = 409)))]
pub(crate) async fn traffic(
    State(gateway): State<Shared>,
    Path(f): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    change(&gateway, "function.traffic", &f, &headers, body, |request: TrafficRequest| {
        Traffic::Shares(request.shares.into_iter().map(|s| (s.revision, s.weight)).collect())
    })
    .await
}

async fn change<R: serde::de::DeserializeOwned>(
    gateway: &Shared,
    event: &'static str,
    f: &str,
    headers: &HeaderMap,
    body: Body,
    traffic: impl FnOnce(R) -> Traffic,
) -> Response {
    let tenant = match gateway.tokens.tenant(headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let result = async {
        let body = body::read_call(gateway, &tenant, body).await?;
        let request = super::invoke::parse_json(&body.bytes)?;
        let to = traffic(request);
        let (runtime, tenant, f) = (gateway.runtime.clone(), tenant.clone(), f.to_owned());
        let work = async move { runtime.set_traffic(&tenant, &f, &to).await };
        let changed = gateway.runtime.background().spawn(work).await;
        let changed = changed.map_err(internal)??;
        Ok(FunctionView::of(&changed, gateway, headers).answer(StatusCode::OK))
    };
    audited(event, &tenant, f, result.await)
}

#[utoipa::path(delete, path = "/functions/{f}", params(("f" = String, Path, description = "name or id")),
    responses((status = 204), (status = 404)))]
pub(crate) async fn delete(State(gateway): State<Shared>, Path(f): Path<String>, headers: HeaderMap) -> Response {
    let tenant = match gateway.tokens.tenant(&headers) {
        Ok(tenant) => tenant,
        Err(error) => return error.into_response(),
    };
    let (runtime, owner, name) = (gateway.runtime.clone(), tenant.clone(), f.clone());
    let work = async move { runtime.delete(&owner, &name).await };
    let result = match gateway.runtime.background().spawn(work).await {
        Ok(Ok(())) => Ok(empty(StatusCode::NO_CONTENT)),
        Ok(Err(rejection)) => Err(rejection.into()),
        Err(e) => Err(internal(e)),
    };
    audited("function.delete", &tenant, &f, result)
}
