//! `fletch warmup` and `fletch evict`: start the work at the server, show its progress, and print its result.

use super::{Context, absent, source};
use crate::cli::WarmupArgs;
use crate::failure::{Exit, Failure};
use crate::out::{bytes, count};
use crate::progress::{Done, Progress, Total, of_work};
use fletch_api::{StartWarmup, Warmup, WarmupState, warmups::PIN_S_DEFAULT};
use fletch_client::{Client, ClientError};
use fletch_core::{DatasetName, Kind};
use serde::Serialize;
use std::io::{self, Write};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

/// The time between two requests for the state of the warm-up.
const POLL_EVERY: Duration = Duration::from_millis(200);
/// How long a request is retried while the server restarts.
const POLL_TIMEOUT: Duration = Duration::from_secs(20);

pub fn run(ctx: &Context, args: &WarmupArgs) -> Result<Exit, Failure> {
    let target = &args.target;
    let client = ctx.client()?;
    let dataset = match source::name_of(&target.base) {
        Some(name) => name,
        None => {
            let datasets = ctx.rt.block_on(client.datasets())?;
            let named = datasets.iter().find(|d| d.name.as_str() == target.base).map(|d| d.name.clone());
            // An existing path comes first.
            source::registered(ctx, &target.base, &datasets).or_else(|e| named.ok_or(e))?
        }
    };
    let ask = StartWarmup {
        dataset: dataset.clone(),
        version: Some(target.select().to_string()),
        check: args.check,
        pin_s: args.pin.map_or(PIN_S_DEFAULT, |l| l.0.as_secs()),
    };
    ctx.rt.block_on(async {
        // Watch before the warm-up begins: a Ctrl-C after that must be reported.
        let mut interrupt =
            signal(SignalKind::interrupt()).map_err(|e| Failure::io("cannot wait for Ctrl-C", &e))?;
        let begun = match client.warm_up(&ask).await {
            Ok(begun) => begun,
            Err(e) => return Err(absent::at_server(ctx, &client, &dataset, &target.select(), e).await),
        };
        if !(args.wait || args.check) {
            ctx.out.result(&begun, |w| writeln!(w, "{}", begun.id))?;
            ctx.out.note(format!("the server is warming up {}; --wait waits for the end", begun.dataset));
            return Ok(Exit::Ok);
        }
        let over = tokio::select! {
            over = wait(ctx, &client, &begun) => over?,
            _ = interrupt.recv() => return interrupted(ctx, &client, args, &begun).await,
        };
        report(ctx, &over)
    })
}

async fn wait(ctx: &Context, client: &Client, begun: &Warmup) -> Result<Warmup, Failure> {
    let client = client.within(POLL_TIMEOUT);
    let (chunks, sum) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let total = Arc::new(Total::default());
    total.files.store(begun.total.chunks, Relaxed);
    total.bytes.store(begun.total.bytes, Relaxed);
    let done: Done = {
        let (chunks, sum) = (Arc::clone(&chunks), Arc::clone(&sum));
        Arc::new(move || (chunks.load(Relaxed), sum.load(Relaxed)))
    };
    let verb = if begun.check { "checking" } else { "warming" };
    let shown = Progress::start(ctx.out, ctx.global.progress, verb, of_work(done, total), None);
    let over = loop {
        let now = client.warmup(&begun.id).await.map_err(lost)?;
        chunks.store(now.looked_at.chunks, Relaxed);
        sum.store(now.looked_at.bytes, Relaxed);
        if now.state.is_over() {
            break now;
        }
        sleep(POLL_EVERY).await;
    };
    drop(shown);
    Ok(over)
}

fn lost(e: ClientError) -> Failure {
    if e.kind() == Kind::NotFound {
        return Failure::new(
            "the server does not know this warm-up any more: it restarted, or the dataset was unregistered",
        )
        .hint("the chunks that it fetched are kept; run the command again to fetch the rest");
    }
    e.into()
}

async fn interrupted(
    ctx: &Context,
    client: &Client,
    args: &WarmupArgs,
    begun: &Warmup,
) -> Result<Exit, Failure> {
    if args.cancel || args.check {
        client.cancel_warmup(&begun.id).await?;
        ctx.out.note("cancelled; the chunks that it fetched are kept");
    } else {
        ctx.out.note(format!(
            "stopped waiting; the warm-up {} goes on at the server (--cancel ends it too)",
            begun.id
        ));
    }
    Ok(Exit::Interrupted)
}

fn report(ctx: &Context, w: &Warmup) -> Result<Exit, Failure> {
    ctx.out.result(w, |out| summary(out, w))?;
    if let Some(p) = &w.error {
        ctx.out.warn(format!("{}; {}", p.detail, p.hint));
    }
    Ok(match w.state {
        WarmupState::Done => Exit::Ok,
        WarmupState::Partial => Exit::Partial,
        _ => Exit::Failed,
    })
}

fn summary(out: &mut dyn Write, w: &Warmup) -> io::Result<()> {
    let there = w.total.chunks.saturating_sub(w.missing.chunks);
    // Rounded down: 100.0 % means all of it.
    let percent = there.saturating_mul(1000).checked_div(w.total.chunks).unwrap_or(1000);
    let (done, tenths) = (percent / 10, percent % 10);
    writeln!(out, "{}\t{}@{}", w.state.as_str(), w.dataset, w.root.0.short())?;
    writeln!(
        out,
        "there\t{there} of {} ({done}.{tenths} %), {} in all",
        count(w.total.chunks, "chunk"),
        bytes(w.total.bytes)
    )?;
    for (what, n) in [
        ("fetched", w.fetched),
        ("refused", w.refused),
        ("failed", w.failed),
        ("damaged", w.damaged),
        ("missing", w.missing),
    ] {
        if n.chunks > 0 {
            writeln!(out, "{what}\t{}, {}", count(n.chunks, "chunk"), bytes(n.bytes))?;
        }
    }
    Ok(())
}

pub fn evict(ctx: &Context, name: &DatasetName) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Evicted<'a> {
        name: &'a DatasetName,
        chunks: u64,
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        unconfirmed: &'a [String],
    }
    let client = ctx.client()?;
    let of = ctx.rt.block_on(client.evict(name))?;
    if !of.unconfirmed.is_empty() {
        let servers = of.unconfirmed.join(", ");
        ctx.out.warn(format!(
            "{servers} did not confirm it, and may still have chunks of {name} on disk; look at \
             `fletch cluster status`, and evict again when they are up"
        ));
    }
    let evicted = Evicted { name, chunks: of.chunks, unconfirmed: &of.unconfirmed };
    ctx.out.result(&evicted, |w| writeln!(w, "{name}\t{} evicted", count(evicted.chunks, "chunk")))
}
