//! `bench-sweep [--seed 1] [--json FILE] [--plot FILE.svg]`
//!
//! The sweep, simulated: jobs × cache × arrangement × speeds, each with no cache, LRU, pin and Fletch, and
//! the bound beside them. Virtual time: the figures are the same on every machine. One case is 800
//! units of 32 samples, two epochs of the slowest job to warm up and four that count.

use fletch_benches::{arg, usage};
use fletch_core::order::sweep::SweepParams;
use fletch_sim::{ArmKind, Outcome, cases::grid_case, simulate};
use plotters::prelude::*;
use std::path::Path;

const JOBS: [usize; 4] = [1, 2, 4, 8];
const CACHES: [f64; 4] = [0.05, 0.1, 0.2, 0.5];
const HOW: [&str; 2] = ["aligned", "staggered"];
const SPEEDS: [&str; 3] = ["equal", "5%", "mixed"];
const ARMS: [ArmKind; 4] = [ArmKind::Direct, ArmKind::Lru, ArmKind::Pin, ArmKind::Fletch];
/// Panels of the plot: jobs, arrangement, speeds, title.
const PANELS: [(usize, &str, &str, &str); 4] = [
    (1, "aligned", "equal", "one job"),
    (4, "staggered", "equal", "4 equal jobs, staggered"),
    (4, "aligned", "mixed", "4 jobs at 1 : 1.3 : 2 : 4"),
    (8, "staggered", "5%", "8 jobs within 5 %, staggered"),
];

/// One cell: what was simulated, and its outcome for each arm.
struct Cell {
    jobs: usize,
    how: &'static str,
    speeds: &'static str,
    cache: f64,
    arms: Vec<Outcome>,
}

impl Cell {
    fn ratio(&self, arm: ArmKind) -> f64 {
        self.arms.iter().find(|o| o.arm == arm).map_or(f64::NAN, |o| o.ratio)
    }

    fn json(&self, o: &Outcome) -> serde_json::Value {
        let round = |x: f64| (x * 1e4).round() / 1e4;
        let near: Vec<f64> = o.near.iter().map(|&x| round(x)).collect();
        serde_json::json!({
            "jobs": self.jobs, "start": self.how, "speeds": self.speeds, "cache": self.cache, "arm": o.arm,
            "backend_per_delivered": round(o.ratio), "bound": round(self.bound()), "by_range": round(o.ranged),
            "near": near, "delivered": o.delivered,
        })
    }

    fn bound(&self) -> f64 {
        self.arms.iter().find(|o| o.arm == ArmKind::Fletch).map_or(f64::NAN, |o| o.bound)
    }
}

fn main() {
    usage(include_str!("sweep.rs"));
    let seed: u64 = arg("seed", 1);
    let (json, plot): (String, String) = (arg("json", String::new()), arg("plot", String::new()));
    let mut cells = Vec::new();
    for jobs in JOBS {
        for how in HOW {
            for speeds in SPEEDS {
                // A lone job has nobody to be staggered against or slower than.
                if jobs == 1 && (how, speeds) != (HOW[0], SPEEDS[0]) {
                    continue;
                }
                for cache in CACHES {
                    let case = grid_case(cache, jobs, how, speeds, seed);
                    let arms = ARMS.iter().map(|&arm| simulate(&case, arm, SweepParams::default())).collect();
                    cells.push(Cell { jobs, how, speeds, cache, arms });
                }
            }
        }
    }
    println!("| jobs | start | speeds | cache | bound | direct | LRU | pin | Fletch | × bound |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for c in &cells {
        let [direct, lru, pin, fletch] = ARMS.map(|a| c.ratio(a));
        println!(
            "| {} | {} | {} | {:.0} % | {:.3} | {direct:.3} | {lru:.3} | {pin:.3} | **{fletch:.3}** | {:.3} |",
            c.jobs,
            c.how,
            c.speeds,
            c.cache * 100.0,
            c.bound(),
            fletch / c.bound(),
        );
    }
    let times: Vec<f64> = cells.iter().map(|c| c.ratio(ArmKind::Fletch) / c.bound()).collect();
    let worst = times.iter().copied().fold(0.0, f64::max);
    println!("\n× bound: mean {:.3}, worst {worst:.3}", times.iter().sum::<f64>() / times.len() as f64);
    if !json.is_empty() {
        let rows: Vec<String> =
            cells.iter().flat_map(|c| c.arms.iter().map(|o| c.json(o).to_string())).collect();
        std::fs::write(&json, format!("[\n{}\n]\n", rows.join(",\n")))
            .unwrap_or_else(|e| panic!("{json}: {e}"));
    }
    if !plot.is_empty() {
        draw(&cells, Path::new(&plot)).unwrap_or_else(|e| panic!("{plot}: {e}"));
    }
}

/// Backend bytes per delivered byte over the cache's size, one panel for each of [`PANELS`].
fn draw(cells: &[Cell], to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(to, (1000, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let root = root.titled(
        "Bytes read from the origin per byte delivered to jobs (less is better)",
        ("sans-serif", 22),
    )?;
    for (area, (jobs, how, speeds, title)) in root.split_evenly((2, 2)).iter().zip(PANELS) {
        let row: Vec<&Cell> =
            cells.iter().filter(|c| (c.jobs, c.how, c.speeds) == (jobs, how, speeds)).collect();
        let mut chart = ChartBuilder::on(area)
            .caption(title, ("sans-serif", 17))
            .margin(10)
            .x_label_area_size(34)
            .y_label_area_size(40)
            .build_cartesian_2d(0.0..0.52, 0.0..1.08)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_desc("cache, part of the dataset")
            .x_labels(6)
            .y_labels(6)
            .x_label_formatter(&|x| format!("{:.0} %", x * 100.0))
            .y_label_formatter(&|y| format!("{y:.1}"))
            .draw()?;
        // No arm: the bound.
        let lines = [
            ("no cache", RGBColor(150, 150, 150), Some(ArmKind::Direct)),
            ("LRU", RGBColor(213, 94, 0), Some(ArmKind::Lru)),
            ("pin", RGBColor(230, 159, 0), Some(ArmKind::Pin)),
            ("Fletch", RGBColor(0, 114, 178), Some(ArmKind::Fletch)),
            ("bound", BLACK, None),
        ];
        for (name, colour, arm) in lines {
            let value = |c: &Cell| arm.map_or_else(|| c.bound(), |arm| c.ratio(arm));
            let points: Vec<(f64, f64)> = row.iter().map(|c| (c.cache, value(c))).collect();
            if arm.is_none() {
                let dashes = DashedLineSeries::new(points, 5, 4, colour.stroke_width(1));
                chart.draw_series(dashes)?.label(name).legend(move |(x, y)| {
                    let dash = |from| PathElement::new([(from, 0), (from + 7, 0)], colour.stroke_width(1));
                    EmptyElement::at((x, y)) + dash(0) + dash(11)
                });
                continue;
            }
            chart
                .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            chart.draw_series(points.iter().map(|&p| Circle::new(p, 3, colour.filled())))?;
        }
        if title == PANELS[0].3 {
            // The one panel with room below its lines.
            let labels = &mut chart.configure_series_labels();
            labels.position(SeriesLabelPosition::LowerLeft).label_font(("sans-serif", 13)).draw()?;
        }
    }
    root.present()?;
    Ok(())
}
