pub(crate) fn check() -> anyhow::Result<()> { anyhow::bail!("see below") }
