//! Modules and models being uploaded: streamed to disk, and what they take there shared out before it is taken.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use http_body::Body as _;
use parking_lot::Mutex;
use tensor_wasm_exec::Rejection;
use tensor_wasm_exec::catalog::upload::{UploadKind, Uploaded};
use tensor_wasm_exec::failure::Shortage;

use crate::body;
use crate::error::ApiError;
use crate::gateway::Gateway;

const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The disk that uploads take until they are kept or refused.
#[derive(Default)]
pub(crate) struct Uploads(Mutex<UploadState>);

#[derive(Default)]
struct UploadState {
    /// What uploads may come to, by tenant: that is held against the tenant's own limit.
    announced: HashMap<String, usize>,
    /// What has come of all of them. What somebody announces and never sends keeps nobody else from uploading.
    received: usize,
}

/// A part of it, given back when dropped.
pub(crate) struct DiskShare {
    uploads: Arc<Uploads>,
    tenant: String,
    announced: usize,
    received: usize,
}

impl Uploads {
    /// Whoever uploads nothing else may always upload one thing, however large it may be.
    fn announce(self: &Arc<Self>, tenant: &str, bytes: usize, tenant_max: usize) -> Result<DiskShare, Rejection> {
        let mut state = self.0.lock();
        let own = state.announced.get(tenant).copied().unwrap_or(0);
        if own > 0 && own.saturating_add(bytes) > tenant_max {
            let shortage = shortage(tenant_max, "[limits] uploads_bytes_max");
            return Err(Rejection::TenantShort { tenant: tenant.to_owned(), shortage, retry_after: RETRY_AFTER });
        }
        *state.announced.entry(tenant.to_owned()).or_default() += bytes;
        Ok(DiskShare { uploads: self.clone(), tenant: tenant.to_owned(), announced: bytes, received: 0 })
    }
}

impl DiskShare {
    /// Takes what has come of an upload, before it is written.
    fn receive(&mut self, bytes: usize, server_max: usize) -> Result<(), Rejection> {
        let mut state = self.uploads.0.lock();
        let is_alone = state.received == self.received;
        if !is_alone && state.received.saturating_add(bytes) > server_max {
            let shortage = shortage(server_max, "[server] uploads_bytes_max");
            return Err(Rejection::ServerShort { shortage, retry_after: RETRY_AFTER });
        }
        state.received += bytes;
        self.received += bytes;
        Ok(())
    }
}

fn shortage(bytes_max: usize, limit: &'static str) -> Shortage {
    let instead = "upload less at once, or raise the limit";
    Shortage { what: "disk for uploads", max: format!("{bytes_max} bytes"), limit, instead }
}

impl Drop for DiskShare {
    fn drop(&mut self) {
        let mut state = self.uploads.0.lock();
        state.received -= self.received;
        if let Some(own) = state.announced.get_mut(&self.tenant) {
            *own -= self.announced;
            if *own == 0 {
                state.announced.remove(&self.tenant);
            }
        }
    }
}

/// Disk for an upload of so many bytes that are there. An empty one counts as a byte.
pub(crate) fn share(gateway: &Gateway, tenant: &str, bytes: usize) -> Result<DiskShare, Rejection> {
    let mut share = announce(gateway, tenant, bytes)?;
    share.receive(bytes, gateway.runtime.config.server.uploads_bytes_max)?;
    Ok(share)
}

fn announce(gateway: &Gateway, tenant: &str, bytes: usize) -> Result<DiskShare, Rejection> {
    let tenant_max = gateway.runtime.config.limits_of(tenant).uploads_bytes_max;
    gateway.uploads.announce(tenant, bytes.max(1), tenant_max)
}

/// Receives a module or a model. What it takes on disk counts until the share is dropped.
pub(crate) async fn receive(
    gateway: &Gateway,
    tenant: &str,
    body: Body,
    kind: UploadKind,
) -> Result<(Uploaded, DiskShare), ApiError> {
    let bytes_max = kind.bytes_max(&gateway.runtime.config.limits_of(tenant));
    let announced = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let lower = announced(body.size_hint().lower());
    if lower > bytes_max {
        return Err(kind.too_large(lower, bytes_max).into());
    }
    // A body of no announced length may become as long as it may be.
    let mut share = announce(gateway, tenant, body.size_hint().upper().map_or(bytes_max, announced).min(bytes_max))?;
    let server_max = gateway.runtime.config.server.uploads_bytes_max;
    let mut upload = match kind {
        UploadKind::Module => gateway.runtime.upload(tenant)?,
        UploadKind::Model => gateway.runtime.upload_model(tenant)?,
    };
    let mut pieces = body::Pieces::of(gateway, body);
    while let Some(piece) = pieces.next().await? {
        share.receive(piece.len(), server_max)?;
        upload.write(&piece).await?;
    }
    Ok((upload.finish().await?, share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_for_uploads_is_shared_out_and_comes_back() {
        let uploads = Arc::new(Uploads::default());
        let announce = |tenant: &str, bytes: usize| uploads.announce(tenant, bytes, 100);
        let mut large = announce("a", 200).ok().unwrap();
        assert!(matches!(announce("a", 1), Err(Rejection::TenantShort { .. })));
        // What is announced takes nothing from others; what has come does.
        let mut other = announce("b", 50).ok().unwrap();
        assert!(other.receive(50, 250).is_ok());
        assert!(large.receive(200, 250).is_ok());
        assert!(matches!(announce("c", 1).ok().unwrap().receive(1, 250), Err(Rejection::ServerShort { .. })));
        drop((large, other));
        assert!(announce("a", usize::MAX).ok().unwrap().receive(1000, 250).is_ok(), "alone it may be any size");
        let state = uploads.0.lock();
        assert!(state.announced.is_empty() && state.received == 0);
    }
}
