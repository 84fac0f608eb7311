//! Measures the disk tier with many chunks: `disk_scale [chunks] [payload bytes] [directory]`.
//!
//! Fills a tier, reads it, then opens it again: after `close`, after a kill (the last slab has no table), and
//! without its catalogue. Prints seconds, rates, and bytes of memory a chunk.

use bytes::Bytes;
use fletch_core::{Domain, Hash, StoreKey, Verified};
use fletch_store::{
    DatasetId,
    disk::{DiskConfig, DiskEngine, Policy, Stored},
};
use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
    time::{Instant, SystemTime},
};

fn chunk(n: u64, len: usize) -> Verified {
    let mut bytes = vec![0x5a; len.max(8)];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    Verified::of(Bytes::from(bytes))
}

fn rss() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn open(dir: &Path, size_max: u64, what: &str) -> Result<DiskEngine, Box<dyn Error>> {
    let before = rss();
    let config = DiskConfig {
        dir: dir.into(),
        size_max,
        free_floor: 0,
        slab_bytes: None,
        policy: Policy::Fletch,
        seed: 1,
        files_max: 64,
        mount_memory: None,
    };
    let (tier, found) = DiskEngine::open(config, SystemTime::now())?;
    println!(
        "start {what}: {:.2} s for {} chunks in {} slabs ({} walked, {} dropped, {} removed, \
         catalogue rebuilt: {}), {} MB of memory more",
        found.took.as_secs_f64(),
        found.records,
        found.slabs,
        found.walked,
        found.dropped,
        found.removed,
        found.rebuilt,
        rss().saturating_sub(before) / 1_000_000
    );
    Ok(tier)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let chunks: u64 = args.next().map_or(Ok(1_000_000), |a| a.parse())?;
    let len: usize = args.next().map_or(Ok(512), |a| a.parse())?;
    let dir: PathBuf =
        args.next().map_or_else(|| std::env::temp_dir().join("fletch-disk-scale"), PathBuf::from);
    if dir.exists() {
        return Err(format!("{} exists", dir.display()).into());
    }
    let size = (chunks * DiskEngine::footprint(len as u32)).max(64 << 20) * 5 / 4;
    let key = |hash: Hash| StoreKey { domain: Domain::default_domain(), hash };

    let tier = open(&dir, size, "empty")?;
    let base = rss();
    let (begin, mut hashes) = (Instant::now(), Vec::with_capacity(chunks as usize / 100 + 1));
    for n in 0..chunks {
        let c = chunk(n, len);
        if n % 100 == 0 {
            hashes.push(c.hash());
        }
        if tier.put(&key(c.hash()), DatasetId(n % 3), &c)? != Stored::Yes {
            return Err(format!("chunk {n} was refused").into());
        }
    }
    let took = begin.elapsed().as_secs_f64();
    println!(
        "fill: {took:.2} s, {:.0} chunks/s, {:.0} MB/s",
        chunks as f64 / took,
        chunks as f64 * len as f64 / took / 1e6
    );
    let s = tier.stats();
    println!(
        "index: {:.1} bytes a chunk as it counts itself, {:.1} as memory grew; {} of {} bytes used",
        s.index_bytes as f64 / chunks as f64,
        rss().saturating_sub(base) as f64 / chunks as f64,
        s.bytes,
        s.capacity
    );
    let begin = Instant::now();
    for h in &hashes {
        let bytes = tier.get(&key(*h))?.ok_or("a miss")?;
        Verified::check(*h, bytes)?;
    }
    println!(
        "read: {:.0} chunks/s with hashing, one thread",
        hashes.len() as f64 / begin.elapsed().as_secs_f64()
    );
    let begin = Instant::now();
    let evicted =
        tier.set_shares(&[(DatasetId(0), u64::MAX), (DatasetId(1), u64::MAX), (DatasetId(2), s.bytes / 6)]);
    println!("shrink: {evicted} chunks evicted at random in {:.2} s", begin.elapsed().as_secs_f64());
    let begin = Instant::now();
    tier.close()?;
    println!("close: {:.2} s", begin.elapsed().as_secs_f64());
    drop(tier);

    let tier = open(&dir, size, "after close")?;
    for n in chunks..chunks + 1000 {
        let c = chunk(n, len);
        tier.put(&key(c.hash()), DatasetId(0), &c)?;
    }
    // Dropped without `close`, as after kill -9.
    drop(tier);
    drop(open(&dir, size, "after kill")?);
    fs::remove_dir_all(dir.join("catalogue"))?;
    let tier = open(&dir, size, "without catalogue")?;
    let usage = tier.usage();
    println!("usage: {} of {size} bytes, catalogue {}", usage.du, usage.catalogue);
    drop(tier);
    fs::remove_dir_all(&dir)?;
    Ok(())
}
