//! The description of the API at `/openapi.json`, collected from the handlers' own annotations.

use utoipa::OpenApi;

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
        routes::system::logs,
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
        routes::invoke::invoke,
        routes::stream::invoke,
        routes::jobs::submit,
        routes::jobs::list,
        routes::jobs::show,
        routes::jobs::cancel,
        routes::run::path,
    )
)]
struct Document;

pub(crate) fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
