//! `fletch seal`: has the server make a version of a draft, and shows how far it is.

use super::Context;
use super::prepare::{Connected, Registered, registered_dataset};
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::progress::{Done, Progress, Total, of_work};
use fletch_api::{RunState, Sealing};
use fletch_client::Client;
use fletch_core::{DatasetName, Kind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::signal::ctrl_c;
use tokio::time::sleep;

/// The time between two looks at a sealing.
const POLL_EVERY: Duration = Duration::from_millis(250);
/// How long a server may be away while a sealing is watched.
const POLL_TIMEOUT: Duration = Duration::from_secs(30);

pub fn run(ctx: &Context, text: &str) -> Result<Exit, Failure> {
    let Registered { connected, dataset, .. } = registered_dataset(ctx, text)?;
    let Some(sealing) = make_version(ctx, &connected, &dataset.name)? else {
        let name = &dataset.name;
        ctx.out.note(format_args!("{name} is no draft: every file of it is known by its hash"));
        return Ok(Exit::Ok);
    };
    let took = sealing.ended_ns.unwrap_or(sealing.started_ns).saturating_sub(sealing.started_ns);
    ctx.out.result(&sealing, |w| {
        writeln!(
            w,
            "{}: {}, {}; {} known, {} read; {:.1} s",
            sealing.dataset,
            count(sealing.entries, "file"),
            bytes(sealing.bytes),
            bytes(sealing.bytes_known),
            bytes(sealing.bytes_read),
            Duration::from_nanos(took).as_secs_f64()
        )?;
        writeln!(w, "mounts that exist show the draft: mount again to see the version")
    })?;
    Ok(Exit::Ok)
}

/// Has the server seal the draft that `latest` of a dataset names, and waits for it. `None`: it names none.
///
/// # Errors
/// The sealing failed, objects block it, or Ctrl-C ended the waiting.
pub fn make_version(
    ctx: &Context,
    connected: &Connected,
    dataset: &DatasetName,
) -> Result<Option<Sealing>, Failure> {
    let client = connected.client.for_dataset(Some(dataset));
    ctx.rt.block_on(async {
        let begun = client.seal(dataset).await?;
        if begun.state == RunState::Done {
            return Ok(None);
        }
        let ended = tokio::select! {
            ended = watch(ctx, &client, dataset, &begun) => ended?,
            _ = ctrl_c() => {
                let hint = format!("the server goes on; `fletch seal {dataset}` shows how far it is");
                return Err(Failure::new("stopped waiting").hint(hint).exit(Exit::Interrupted));
            }
        };
        match &ended.error {
            Some(problem) => Err(Failure::new(problem.detail.clone()).hint(problem.hint.clone()).if_full()),
            None => Ok(Some(ended)),
        }
    })
}

/// Shows the progress of a sealing until its end.
async fn watch(
    ctx: &Context,
    client: &Client,
    dataset: &DatasetName,
    begun: &Sealing,
) -> Result<Sealing, Failure> {
    let client = client.within(POLL_TIMEOUT);
    let (entries, read) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let total = Arc::new(Total::default());
    total.files.store(begun.entries, Relaxed);
    total.bytes.store(begun.bytes, Relaxed);
    let done: Done = {
        let (entries, read) = (Arc::clone(&entries), Arc::clone(&read));
        Arc::new(move || (entries.load(Relaxed), read.load(Relaxed)))
    };
    let shown = Progress::start(ctx.out, ctx.global.progress, "sealing", of_work(done, total), None);
    let ended = loop {
        let now = match client.sealing(dataset).await {
            // Another server of the cluster answers, or the server was started again.
            Err(e) if e.kind() == Kind::NotFound => client.seal(dataset).await?,
            now => now?,
        };
        entries.store(now.entries_done, Relaxed);
        read.store(now.bytes_known + now.bytes_read, Relaxed);
        if now.ended_ns.is_some() {
            break now;
        }
        sleep(POLL_EVERY).await;
    };
    drop(shown);
    Ok(ended)
}
