// Draws the panels that "demo dashboard" wrote, in the places that the dashboard gives them: node draw.mjs PANELS.json PICTURE.svg
import { readFileSync, writeFileSync } from 'node:fs'
import * as echarts from 'echarts'

const column = 60 // pixels: the grid of a Grafana dashboard has 24 columns
const row = 34
const gap = 6
const palette = ['#3274d9', '#56a64b', '#e0752d', '#a352cc', '#e02f44', '#8f8f8f', '#37872d', '#c4a000', '#1f60c4', '#ad0317']

// What a value of a unit looks like; the units are those of Grafana that the dashboard uses.
const scaled = (value, steps) => {
  const [factor, unit] = steps.find(([factor]) => Math.abs(value) >= factor) ?? steps.at(-1)
  return `${Number((value / factor).toPrecision(3))}${unit}`
}
const formats = {
  s: v => scaled(v, [[60, ' min'], [1, ' s'], [1e-3, ' ms'], [1e-6, ' µs']]),
  Bps: v => scaled(v, [[1e6, ' MB/s'], [1e3, ' kB/s'], [1, ' B/s']]),
  ops: v => `${Number(v.toPrecision(3))}/s`,
  pps: v => `${Number(v.toPrecision(3))} p/s`,
}
const format = unit => formats[unit] ?? (v => `${Number(v.toPrecision(3))}`)

const escape = text => text.replace(/&/g, '&amp;').replace(/</g, '&lt;')
const last = series => series.points.findLast(([, value]) => value !== null)?.[1]

// Series with the largest last values first; a panel has place for so many.
const shown = panel => [...panel.series].sort((a, b) => (last(b) ?? 0) - (last(a) ?? 0)).slice(0, 6)

function chart(panel, width, height) {
  const instance = echarts.init(null, null, { renderer: 'svg', ssr: true, width, height })
  const series = shown(panel)
  instance.setOption({
    animation: false,
    color: palette,
    useUTC: true,
    grid: { left: 8, right: 12, top: 8, bottom: series.length > 3 ? 60 : series.length ? 24 : 8, containLabel: true },
    xAxis: { type: 'time', axisLabel: { fontSize: 9, hideOverlap: true }, splitNumber: 4 },
    yAxis: { type: 'value', min: 0, axisLabel: { fontSize: 9, formatter: format(panel.unit) }, splitNumber: 3, splitLine: { lineStyle: { color: '#e6e6e6' } } },
    legend: {
      bottom: 0, left: 4, itemWidth: 10, itemHeight: 2, itemGap: 26, textStyle: { fontSize: 9 },
      formatter: name => { const one = series.find(s => s.name === name); return `${name} ${last(one) === undefined ? '' : format(panel.unit)(last(one))}` },
    },
    series: series.map(s => ({ name: s.name, type: 'line', data: s.points, showSymbol: false, lineStyle: { width: 1.3 } })),
  })
  const svg = instance.renderToSVGString()
  instance.dispose()
  return svg
}

function stat(panel, width, height) {
  const all = panel.series
  return all.map((s, i) => {
    const x = width * (i + 0.5) / all.length
    return `<text x="${x}" y="${height / 2}" text-anchor="middle" font-size="30" fill="${palette[1]}">${format(panel.unit)(last(s) ?? 0)}</text>` +
      `<text x="${x}" y="${height / 2 + 22}" text-anchor="middle" font-size="12" fill="#555">${escape(s.name)}</text>`
  }).join('')
}

function draw(panel) {
  const { x, y, w, h } = panel.gridPos
  const [left, top, width, height] = [x * column, y * row, w * column - gap, h * row - gap]
  if (panel.type === 'row') {
    return `<text x="${left + 4}" y="${top + 22}" font-size="15" font-weight="bold" fill="#222">${escape(panel.title)}</text>`
  }
  const body = panel.type === 'stat' ? stat(panel, width, height - 24) : chart(panel, width, height - 24)
  const none = panel.series.length ? '' : `<text x="${width / 2}" y="${height / 2}" text-anchor="middle" font-size="12" fill="#999">No data</text>`
  return `<g transform="translate(${left},${top})"><rect width="${width}" height="${height}" fill="#fff" stroke="#ddd" rx="3"/>` +
    `<text x="10" y="17" font-size="12" font-weight="bold" fill="#333">${escape(panel.title)}</text>` +
    `<g transform="translate(0,22)">${body}</g>${none}</g>`
}

const [, , from, to] = process.argv
const panels = JSON.parse(readFileSync(from, 'utf8'))
const bottom = Math.max(...panels.map(p => p.gridPos.y + p.gridPos.h)) * row
writeFileSync(to, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="-6 -6 ${24 * column + 6} ${bottom + 6}" font-family="sans-serif">` +
  `<rect x="-6" y="-6" width="100%" height="100%" fill="#f4f5f5"/>${panels.map(draw).join('\n')}</svg>\n`)
