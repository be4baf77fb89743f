//! The description of the API at `/openapi.json`: paths and shapes are collected from the handlers' own annotations,
//! and what is the same for many of them is added from the tables here. Names of operations, who may use them, how they
//! fail, what names look like.

use serde_json::{Map, Value, json};
use utoipa::OpenApi;

use crate::auth::TENANT_HEADER;
use crate::routes;

#[derive(OpenApi)]
#[openapi(
    info(title = "TensorWasm", description = "Deploy an untrusted WebAssembly function, get an HTTP endpoint."),
    paths(
        routes::system::dashboard,
        routes::system::healthz,
        routes::system::readyz,
        routes::system::metrics,
        routes::system::openapi,
        routes::system::limits,
        routes::logs::show,
        routes::functions::deploy,
        routes::functions::list,
        routes::functions::show,
        routes::functions::delete,
        routes::functions::revisions,
        routes::functions::rollback,
        routes::functions::traffic,
        routes::secrets::set,
        routes::secrets::list,
        routes::secrets::delete,
        routes::models::add,
        routes::models::list,
        routes::models::show,
        routes::models::remove,
        routes::invoke::invoke,
        routes::stream::invoke,
        routes::jobs::submit,
        routes::jobs::list,
        routes::jobs::show,
        routes::jobs::cancel,
        routes::run::below_run,
        routes::run::below_tenant,
    )
)]
struct Document;

/// Who may use an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Anyone,
    /// A tenant's token, where there are tokens.
    Tenant,
    /// A token for every tenant.
    Operator,
    /// A tenant's token, unless the function is public.
    Function,
}

/// How an operation can fail, besides what its [`Access`] means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fails {
    /// Part of the path or of the query does not fit.
    Parts,
    /// It looks something up by name.
    Lookup,
    /// It reads a body.
    Body,
    /// It changes what is stored.
    Change,
    /// It compiles a module.
    Compile,
    /// It reads a model.
    Model,
    /// It runs a guest.
    Call,
    /// It takes a place of which a tenant has so many.
    Place,
    /// It answers no while the server shuts down.
    Closing,
}

use Access::{Anyone, Function, Operator, Tenant};
use Fails::{Body, Call, Change, Closing, Compile, Lookup, Model, Parts, Place};

/// Every operation: where, what it is called, who may, how it fails. (Functions take any method; see `FUNCTION_PATHS`.)
const OPERATIONS: [(&str, &str, &str, Access, &[Fails]); 27] = [
    ("get", "/", "showDashboard", Anyone, &[]),
    ("get", "/healthz", "getHealth", Anyone, &[]),
    ("get", "/readyz", "getReadiness", Anyone, &[Closing]),
    ("get", "/metrics", "getMetrics", Operator, &[]),
    ("get", "/openapi.json", "getDescription", Anyone, &[]),
    ("get", "/limits", "getLimits", Tenant, &[]),
    ("get", "/functions", "listFunctions", Tenant, &[]),
    ("post", "/functions", "deployFunction", Tenant, &[Parts, Body, Change, Compile]),
    ("get", "/functions/{f}", "showFunction", Tenant, &[Parts, Lookup]),
    ("delete", "/functions/{f}", "deleteFunction", Tenant, &[Parts, Lookup, Change]),
    ("get", "/functions/{f}/revisions", "listRevisions", Tenant, &[Parts, Lookup]),
    ("post", "/functions/{f}/rollback", "rollbackFunction", Tenant, &[Parts, Lookup, Body, Change]),
    ("put", "/functions/{f}/traffic", "splitTraffic", Tenant, &[Parts, Lookup, Body, Change]),
    ("get", "/functions/{f}/secrets", "listSecrets", Tenant, &[Parts, Lookup]),
    ("put", "/functions/{f}/secrets/{key}", "setSecret", Tenant, &[Parts, Lookup, Body, Change]),
    ("delete", "/functions/{f}/secrets/{key}", "deleteSecret", Tenant, &[Parts, Lookup, Change]),
    ("get", "/functions/{f}/logs", "readLogs", Tenant, &[Parts, Lookup, Place]),
    ("post", "/functions/{f}/invoke", "invokeFunction", Tenant, &[Parts, Lookup, Body, Call]),
    ("post", "/functions/{f}/invoke-async", "submitJob", Tenant, &[Parts, Lookup, Body, Change, Place]),
    ("post", "/functions/{f}/invoke-stream", "streamFunction", Tenant, &[Parts, Lookup, Body, Call]),
    ("get", "/models", "listModels", Tenant, &[]),
    ("get", "/models/{name}", "showModel", Tenant, &[Parts, Lookup]),
    ("put", "/models/{name}", "addModel", Tenant, &[Parts, Body, Change, Model]),
    ("delete", "/models/{name}", "removeModel", Tenant, &[Parts, Lookup, Change]),
    ("get", "/jobs", "listJobs", Tenant, &[Parts, Closing]),
    ("get", "/jobs/{id}", "showJob", Tenant, &[Parts, Lookup, Closing]),
    ("delete", "/jobs/{id}", "cancelJob", Tenant, &[Parts, Lookup, Change]),
];

/// Where functions answer, to whatever method.
const FUNCTION_PATHS: [(&str, &str); 2] =
    [("/run/{name}/{path}", "runFunction"), ("/t/{tenant}/{name}/{path}", "runTenantFunction")];

/// Every kind of error and its status. `error.rs` decides; this says so.
const KINDS: [(&str, u16); 31] = [
    ("invalid_host", 400),
    ("invalid_name", 400),
    ("invalid_args", 400),
    ("invalid_json", 400),
    ("invalid_base64", 400),
    ("invalid_body", 400),
    ("invalid_wasm", 400),
    ("invalid_model", 400),
    ("missing_export", 400),
    ("too_many_args", 400),
    ("unauthorized", 401),
    ("origin_denied", 403),
    ("permission_denied", 403),
    ("tenant_scope_denied", 403),
    ("not_found", 404),
    ("method_not_allowed", 405),
    ("body_too_slow", 408),
    ("conflict", 409),
    ("body_too_large", 413),
    ("module_too_large", 413),
    ("module_memory_too_large", 413),
    ("unsupported_media_type", 415),
    ("unknown_host", 421),
    ("guest_trap", 422),
    ("hostcall_too_large", 422),
    ("rate_limited", 429),
    ("tenant_capacity_exhausted", 429),
    ("internal", 500),
    ("guest_bad_response", 502),
    ("capacity_exhausted", 503),
    ("invoke_timeout", 504),
];

/// What any request may be told.
const ALWAYS: [&str; 4] = ["invalid_host", "origin_denied", "unknown_host", "internal"];

impl Access {
    fn kinds(self) -> &'static [&'static str] {
        match self {
            Anyone => &[],
            Tenant | Function => &["invalid_name", "unauthorized", "tenant_scope_denied"],
            Operator => &["unauthorized", "permission_denied"],
        }
    }
}

impl Fails {
    fn kinds(self) -> &'static [&'static str] {
        match self {
            Parts => &["invalid_args"],
            Lookup => &["not_found"],
            Body => &[
                "invalid_json",
                "invalid_body",
                "body_too_slow",
                "body_too_large",
                "unsupported_media_type",
                "tenant_capacity_exhausted",
                "capacity_exhausted",
            ],
            Change => &["conflict", "capacity_exhausted"],
            Compile => &["invalid_wasm", "invalid_base64", "module_too_large", "module_memory_too_large"],
            Model => &["invalid_model"],
            Call => &[
                "missing_export",
                "too_many_args",
                "conflict",
                "guest_trap",
                "hostcall_too_large",
                "rate_limited",
                "tenant_capacity_exhausted",
                "guest_bad_response",
                "capacity_exhausted",
                "invoke_timeout",
            ],
            Place => &["tenant_capacity_exhausted"],
            Closing => &["capacity_exhausted"],
        }
    }
}

/// What names of functions, models and tenants look like (`check_name` in the runtime).
const NAME_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$";

/// Names of secrets, which become environment variables.
const SECRET_PATTERN: &str = "^[A-Za-z_][A-Za-z0-9_]{0,127}$";

/// Whether a route takes a method.
pub(crate) fn is_operation(method: &http::Method, route: &str) -> bool {
    OPERATIONS.iter().any(|(own, path, ..)| *path == route && own.eq_ignore_ascii_case(method.as_str()))
}

/// The document; `with_tokens` where this server asks for them.
pub(crate) fn document(with_tokens: bool) -> Value {
    let mut document = serde_json::to_value(Document::openapi()).unwrap_or_default();
    bound_integers(&mut document);
    let components = &mut document["components"];
    components["securitySchemes"] = json!({ "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "one of TENSOR_WASM_API_TOKENS",
    } });
    components["schemas"]["Error"] = json!({
        "type": "object",
        "required": ["error"],
        "properties": { "error": {
            "type": "object",
            "required": ["kind", "message"],
            "properties": {
                "kind": { "type": "string", "enum": KINDS.map(|(kind, _)| kind), "description": "for programs" },
                "message": { "type": "string", "description": "for people" },
            },
        } },
    });
    let function_methods = ["get", "head", "post", "put", "delete", "patch", "options", "trace"];
    for (method, path, id, access, fails) in OPERATIONS {
        describe(&mut document, method, path, id, access, fails, with_tokens);
    }
    for (path, id) in FUNCTION_PATHS {
        for method in function_methods {
            let id = format!("{id}{}{}", method[..1].to_uppercase(), &method[1..]);
            describe(&mut document, method, path, &id, Function, &[Parts, Lookup, Call], with_tokens);
        }
    }
    for (pointer, constraint) in constraints() {
        if let (Some(Value::Object(schema)), Value::Object(more)) = (document.pointer_mut(pointer), constraint) {
            schema.extend(more);
        }
    }
    document
}

/// What shapes alone do not say.
fn constraints() -> [(&'static str, Value); 6] {
    [
        ("/components/schemas/DeployRequest/properties/name", json!({ "pattern": NAME_PATTERN })),
        ("/components/schemas/DeployRequest/properties/wasm_b64", json!({ "contentEncoding": "base64" })),
        ("/components/schemas/TrafficRequest/properties/shares", json!({ "minItems": 1, "maxItems": 2 })),
        ("/components/schemas/ShareView/properties/weight", json!({ "minimum": 1, "maximum": WEIGHT_MAX })),
        ("/components/schemas/InvokeRequest", json!({ "additionalProperties": false })),
        ("/components/schemas/SubmitRequest", json!({ "additionalProperties": false })),
    ]
}

const WEIGHT_MAX: u32 = tensor_wasm_exec::catalog::WEIGHT_MAX;

fn describe(
    document: &mut Value,
    method: &str,
    path: &str,
    id: &str,
    access: Access,
    fails: &[Fails],
    with_tokens: bool,
) {
    let Some(Value::Object(operation)) = document["paths"].get_mut(path).and_then(|item| item.get_mut(method)) else {
        return;
    };
    operation.insert("operationId".to_owned(), json!(id));
    if with_tokens {
        let security = match access {
            Anyone => json!([]),
            Tenant | Operator => json!([{ "token": [] }]),
            // Public functions ask nobody.
            Function => json!([{ "token": [] }, {}]),
        };
        operation.insert("security".to_owned(), security);
    }
    let named = json!({ "type": "string", "pattern": NAME_PATTERN });
    let parameters = operation.entry("parameters").or_insert_with(|| json!([]));
    if let Value::Array(parameters) = parameters {
        for parameter in parameters.iter_mut() {
            match parameter["name"].as_str() {
                Some("f" | "name" | "tenant") => parameter["schema"] = named.clone(),
                Some("key") => parameter["schema"] = json!({ "type": "string", "pattern": SECRET_PATTERN }),
                _ => {}
            }
        }
        if access == Tenant || path == FUNCTION_PATHS[0].0 {
            parameters.push(json!({
                "name": TENANT_HEADER,
                "in": "header",
                "required": false,
                "description": "the tenant to speak for; the token's own, or `default`, where it is left out",
                "schema": named,
            }));
        }
    }
    let kinds: Vec<&str> =
        ALWAYS.iter().chain(access.kinds()).chain(fails.iter().flat_map(|fails| fails.kinds())).copied().collect();
    let Some(Value::Object(responses)) = operation.get_mut("responses") else { return };
    for (kind, status) in KINDS.iter().filter(|(kind, _)| kinds.contains(kind)) {
        let response = responses.entry(status.to_string()).or_insert(Value::Null);
        let said =
            response["description"].as_str().filter(|text| !text.is_empty() && response.get("content").is_some());
        let description = said.map_or_else(|| format!("`{kind}`"), |text| format!("{text}, `{kind}`"));
        let content = json!({ "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } });
        let mut entry =
            Map::from_iter([("description".to_owned(), json!(description)), ("content".to_owned(), content)]);
        if matches!(status, 429 | 503) {
            let header = json!({ "schema": { "type": "integer" }, "description": "seconds" });
            entry.insert("headers".to_owned(), json!({ "retry-after": header }));
        }
        *response = Value::Object(entry);
    }
    if access == Function {
        // A guest answers whatever it likes, in whatever type, with the statuses of our errors too.
        responses.retain(|status, _| KINDS.iter().any(|(_, own)| *status == own.to_string()));
        for response in responses.values_mut() {
            let ours = response["description"].as_str().unwrap_or_default();
            *response = json!({ "description": format!("ours: {ours}; or what the function answers") });
        }
        responses.insert("default".to_owned(), json!({ "description": "what the function answers" }));
    }
}

/// Integers are what Rust can hold, which the shapes say by name only.
fn bound_integers(value: &mut Value) {
    match value {
        Value::Object(object) => {
            let maximum = match object.get("format").and_then(Value::as_str) {
                Some("int32") => Some(json!(u32::MAX)),
                Some("int64") => Some(json!(u64::MAX)),
                // `usize`, which is no format.
                None if object.get("type").is_some_and(|ty| ty.to_string().contains("integer")) => {
                    Some(json!(u64::MAX))
                }
                _ => None,
            };
            if let Some(maximum) = maximum.filter(|_| object.get("minimum") == Some(&json!(0))) {
                object.insert("maximum".to_owned(), maximum);
            }
            object.values_mut().for_each(bound_integers);
        }
        Value::Array(array) => array.iter_mut().for_each(bound_integers),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn operations_have_names_security_and_every_status() {
        let document = document(true);
        assert_eq!(document["components"]["securitySchemes"]["token"]["scheme"], "bearer");
        let mut ids = BTreeSet::new();
        let mut operations = 0;
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                operations += 1;
                let id = operation["operationId"].as_str().unwrap_or_else(|| panic!("{method} {path} has no name"));
                assert!(ids.insert(id.to_owned()), "{id} twice");
                assert!(operation["security"].is_array(), "{method} {path} does not say who may");
                let function = FUNCTION_PATHS.iter().any(|(known, _)| known == path);
                let described = OPERATIONS.iter().find(|(m, p, ..)| m == method && p == path);
                let Some((_, _, _, access, fails)) = described else {
                    assert!(function, "{method} {path} is in no table");
                    for status in ["401", "404", "429", "503", "504", "default"] {
                        assert!(operation["responses"].get(status).is_some(), "{method} {path}: {status}");
                    }
                    continue;
                };
                let kinds = ALWAYS.iter().chain(access.kinds()).chain(fails.iter().flat_map(|f| f.kinds()));
                for kind in kinds {
                    let (_, status) = KINDS.iter().find(|(known, _)| known == kind).unwrap();
                    let said = operation["responses"][status.to_string()]["description"].as_str().unwrap_or_default();
                    assert!(said.contains(kind), "{method} {path}: {status} {kind} is not documented: {said}");
                }
                let succeeds = operation["responses"].as_object().unwrap().keys().any(|status| status.starts_with('2'));
                assert!(succeeds, "{method} {path}");
            }
        }
        assert_eq!(operations, OPERATIONS.len() + FUNCTION_PATHS.len() * 8);
        for (pointer, _) in constraints() {
            assert!(document.pointer(pointer).is_some(), "{pointer} is gone");
        }
    }

    /// Every kind of error that the sources can make is in the table, with its status.
    #[test]
    fn every_kind_of_error_is_documented() {
        let known: BTreeSet<&str> = KINDS.iter().map(|(kind, _)| *kind).collect();
        let failures = include_str!("../../tensor-wasm-exec/src/failure.rs");
        let kinds = failures.split("fn kind(&self)").skip(1).map(|rest| rest.split("\n    }\n").next().unwrap());
        let quoted = |text: &str| -> Vec<String> { text.split('"').skip(1).step_by(2).map(str::to_owned).collect() };
        let mut seen = 0;
        for kind in kinds.flat_map(quoted).filter(|kind| !kind.contains(' ')) {
            seen += 1;
            assert!(known.contains(kind.as_str()), "{kind} (failure.rs) is not in KINDS");
        }
        assert!(seen > 15, "{seen}");
        let sources = [
            include_str!("auth.rs"),
            include_str!("body.rs"),
            include_str!("error.rs"),
            include_str!("extract.rs"),
            include_str!("gateway.rs"),
            include_str!("guard.rs"),
            include_str!("hosts.rs"),
            include_str!("routes/functions.rs"),
            include_str!("routes/invoke.rs"),
            include_str!("routes/jobs.rs"),
            include_str!("routes/logs.rs"),
            include_str!("routes/models.rs"),
            include_str!("routes/run.rs"),
            include_str!("routes/secrets.rs"),
            include_str!("upload.rs"),
        ];
        for source in sources {
            for made in source.split("ApiError::bad_request(").chain(source.split("ApiError::new(")).skip(1) {
                let arguments = &made[..made.len().min(90)];
                let Some(kind) = arguments.split('"').nth(1) else { continue };
                let is_kind = !kind.is_empty() && kind.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
                assert!(!is_kind || known.contains(kind), "{kind} is not in KINDS: {arguments}");
            }
        }
    }
}
