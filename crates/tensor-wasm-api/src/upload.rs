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

/// The disk that uploads take until they are kept or refused, by tenant.
#[derive(Default)]
pub(crate) struct Uploads {
    by_tenant: Mutex<HashMap<String, usize>>,
}

/// A part of it, given back when dropped.
pub(crate) struct DiskShare {
    uploads: Arc<Uploads>,
    tenant: String,
    bytes: usize,
}

impl Uploads {
    /// Whoever uploads nothing else may always upload one thing, however large it may be.
    fn share(
        self: &Arc<Self>,
        tenant: &str,
        bytes: usize,
        (tenant_max, server_max): (usize, usize),
    ) -> Result<DiskShare, Rejection> {
        let mut by_tenant = self.by_tenant.lock();
        let total: usize = by_tenant.values().sum();
        let own = by_tenant.get(tenant).copied().unwrap_or(0);
        if own > 0 && own.saturating_add(bytes) > tenant_max {
            let shortage = shortage(tenant_max, "[limits] uploads_bytes_max");
            return Err(Rejection::TenantShort { tenant: tenant.to_owned(), shortage, retry_after: RETRY_AFTER });
        }
        if total > 0 && total.saturating_add(bytes) > server_max {
            let shortage = shortage(server_max, "[server] uploads_bytes_max");
            return Err(Rejection::ServerShort { shortage, retry_after: RETRY_AFTER });
        }
        *by_tenant.entry(tenant.to_owned()).or_default() += bytes;
        Ok(DiskShare { uploads: self.clone(), tenant: tenant.to_owned(), bytes })
    }
}

fn shortage(bytes_max: usize, limit: &'static str) -> Shortage {
    let instead = "upload less at once, or raise the limit";
    Shortage { what: "disk for uploads", max: format!("{bytes_max} bytes"), limit, instead }
}

impl DiskShare {
    /// Takes as much as an upload has come to, or refuses it.
    fn grow(&mut self, gateway: &Gateway, bytes: usize) -> Result<(), Rejection> {
        let config = &gateway.runtime.config;
        self.grow_within(bytes, (config.limits_of(&self.tenant).uploads_bytes_max, config.server.uploads_bytes_max))
    }

    fn grow_within(&mut self, bytes: usize, (tenant_max, server_max): (usize, usize)) -> Result<(), Rejection> {
        let more = bytes.saturating_sub(self.bytes);
        let mut by_tenant = self.uploads.by_tenant.lock();
        let total: usize = by_tenant.values().sum();
        let own = by_tenant.entry(self.tenant.clone()).or_default();
        let (others, all_others) = (own.saturating_sub(self.bytes), total.saturating_sub(self.bytes));
        if others > 0 && own.saturating_add(more) > tenant_max {
            let shortage = shortage(tenant_max, "[limits] uploads_bytes_max");
            return Err(Rejection::TenantShort { tenant: self.tenant.clone(), shortage, retry_after: RETRY_AFTER });
        }
        if all_others > 0 && total.saturating_add(more) > server_max {
            let shortage = shortage(server_max, "[server] uploads_bytes_max");
            return Err(Rejection::ServerShort { shortage, retry_after: RETRY_AFTER });
        }
        *own += more;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for DiskShare {
    fn drop(&mut self) {
        let mut by_tenant = self.uploads.by_tenant.lock();
        if let Some(own) = by_tenant.get_mut(&self.tenant) {
            *own -= self.bytes;
            if *own == 0 {
                by_tenant.remove(&self.tenant);
            }
        }
    }
}

/// Disk for an upload of so many bytes. An empty one counts as a byte.
pub(crate) fn share(gateway: &Gateway, tenant: &str, bytes: usize) -> Result<DiskShare, Rejection> {
    let config = &gateway.runtime.config;
    let max = (config.limits_of(tenant).uploads_bytes_max, config.server.uploads_bytes_max);
    gateway.uploads.share(tenant, bytes.max(1), max)
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
    // Taken as the bytes come: what somebody announces and never sends must not keep others from uploading.
    let mut share = share(gateway, tenant, 1)?;
    let mut received = 0_usize;
    let mut upload = match kind {
        UploadKind::Module => gateway.runtime.upload(tenant)?,
        UploadKind::Model => gateway.runtime.upload_model(tenant)?,
    };
    let mut pieces = body::Pieces::of(gateway, body);
    while let Some(piece) = pieces.next().await? {
        received = received.saturating_add(piece.len());
        share.grow(gateway, received)?;
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
        let max = (100, 250);
        let large = uploads.share("a", 200, max).ok().unwrap();
        assert!(matches!(uploads.share("a", 1, max), Err(Rejection::TenantShort { .. })));
        let other = uploads.share("b", 50, max).ok().unwrap();
        assert!(matches!(uploads.share("c", 1, max), Err(Rejection::ServerShort { .. })));
        // What is announced takes nothing; what has come does.
        let mut growing = uploads.share("d", 1, (100, 1000)).ok().unwrap();
        assert!(growing.grow_within(700, (100, 1000)).is_ok(), "it uploads nothing else");
        assert!(matches!(growing.grow_within(751, (100, 1000)), Err(Rejection::ServerShort { .. })));
        drop(growing);
        drop((large, other));
        assert!(uploads.share("a", usize::MAX, max).is_ok());
        assert!(uploads.by_tenant.lock().is_empty());
    }
}
