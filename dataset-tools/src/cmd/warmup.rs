//! `fletch warmup` and `fletch evict`: asks the server, shows how far it is, and says what is true at
//! the end.

use super::Ctx;
use crate::cli::WarmupArgs;
use crate::failure::{Exit, Failure};
use crate::out::bytes;
use crate::progress::{Done, Progress, Total};
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

/// Between two looks at how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long an answer is waited for while the server restarts.
const LOOK_WITHIN: Duration = Duration::from_secs(20);

pub fn run(ctx: &Ctx, args: &WarmupArgs) -> Result<Exit, Failure> {
    let target = &args.target;
    let dataset = DatasetName::new(&target.base).map_err(|e| {
        Failure::usage(e.to_string())
            .hint("name a registered dataset: NAME or NAME@TAG (see `fletch datasets`)")
    })?;
    let ask = StartWarmup {
        dataset,
        version: Some(target.select().to_string()),
        check: args.check,
        pin_s: args.pin.map_or(PIN_S_DEFAULT, |l| l.0.as_secs()),
    };
    let client = ctx.client()?;
    ctx.rt.block_on(async {
        // Before it begins: a Ctrl-C in between must not leave it unsaid.
        let mut interrupt =
            signal(SignalKind::interrupt()).map_err(|e| Failure::io("cannot wait for Ctrl-C", &e))?;
        let begun = client.warm_up(&ask).await?;
        if !(args.wait || args.check) {
            ctx.out.result(&begun, |w| writeln!(w, "{}", begun.id))?;
            ctx.out.note(format!("the server warms {} up; wait for it with --wait", begun.dataset));
            return Ok(Exit::Ok);
        }
        let over = tokio::select! {
            over = wait(ctx, &client, &begun) => over?,
            _ = interrupt.recv() => return interrupted(ctx, &client, args, &begun).await,
        };
        tell(ctx, &over)
    })
}

async fn wait(ctx: &Ctx, client: &Client, begun: &Warmup) -> Result<Warmup, Failure> {
    let client = client.within(LOOK_WITHIN);
    let (chunks, sum) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let total = Arc::new(Total::default());
    total.files.store(begun.total.chunks, Relaxed);
    total.bytes.store(begun.total.bytes, Relaxed);
    let done: Done = {
        let (chunks, sum) = (Arc::clone(&chunks), Arc::clone(&sum));
        Arc::new(move || (chunks.load(Relaxed), sum.load(Relaxed)))
    };
    let verb = if begun.check { "checking" } else { "warming" };
    let shown = Progress::start(ctx.out, ctx.global.progress, verb, done, total, None);
    let over = loop {
        let now = client.warmup(&begun.id).await.map_err(lost)?;
        chunks.store(now.looked_at.chunks, Relaxed);
        sum.store(now.looked_at.bytes, Relaxed);
        if now.state.is_over() {
            break now;
        }
        sleep(LOOK_EVERY).await;
    };
    drop(shown);
    Ok(over)
}

fn lost(e: ClientError) -> Failure {
    if e.kind() == Kind::NotFound {
        return Failure::new(
            "the server has forgotten this warm-up: it was restarted, or the dataset is not ours any more",
        )
        .hint("what it brought is kept; run the command again, it brings what is missing");
    }
    e.into()
}

async fn interrupted(ctx: &Ctx, client: &Client, args: &WarmupArgs, begun: &Warmup) -> Result<Exit, Failure> {
    if args.cancel || args.check {
        client.cancel_warmup(&begun.id).await?;
        ctx.out.note("cancelled; what it brought is kept");
    } else {
        ctx.out.note(format!(
            "not waiting any more; the warm-up {} goes on at the server (--cancel would have ended it)",
            begun.id
        ));
    }
    Ok(Exit::Interrupted)
}

fn tell(ctx: &Ctx, w: &Warmup) -> Result<Exit, Failure> {
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
    // Never rounded up to what it is not.
    let percent = there.saturating_mul(1000).checked_div(w.total.chunks).unwrap_or(1000);
    let (done, tenths) = (percent / 10, percent % 10);
    writeln!(out, "{}\t{}@{}", w.state.as_str(), w.dataset, w.root.0.short())?;
    writeln!(
        out,
        "there\t{there} of {} chunks ({done}.{tenths} %), {} in all",
        w.total.chunks,
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
            writeln!(out, "{what}\t{} chunks, {}", n.chunks, bytes(n.bytes))?;
        }
    }
    Ok(())
}

pub fn evict(ctx: &Ctx, name: &DatasetName) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Gone<'a> {
        name: &'a DatasetName,
        chunks: u64,
    }
    let client = ctx.client()?;
    let gone = Gone { name, chunks: ctx.rt.block_on(client.evict(name))?.chunks };
    ctx.out.result(&gone, |w| writeln!(w, "{name}\t{} chunks evicted", gone.chunks))
}
