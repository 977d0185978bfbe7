// Links in the pages are as GitHub wants them: relative to the file that they are in. On the site a link to a page leads to
// the page, a link to another file of docs to a copy of it, and one that leaves docs to the repository.
import fs from 'node:fs'
import path from 'node:path'
import { map } from './map.js'

export const repository = 'https://github.com/opiproject/xpu-device-plugin'

// ref is the tag or branch that the pages are of.
const ref = process.env.SITE_REF || 'main'

// inRepository is where GitHub shows a file or a directory.
export const inRepository = (root, file) =>
  `${repository}/${fs.statSync(path.join(root, file)).isDirectory() ? 'tree' : 'blob'}/${ref}/${file}`

// route is the path on the site of a page or of another file of docs: the project's README.md is the first page.
export function route(file) {
  if (file === 'README.md') return 'index.md'
  if (file === map) return 'map.md'
  return file.replace(/^docs\//, '').replace(/(^|\/)README\.md$/, '$1index.md')
}

// slug is the anchor that GitHub gives a heading.
export const slug = heading =>
  heading.trim().toLowerCase().replace(/[^\p{L}\p{M}\p{N}\p{Pc}\- ]/gu, '').replace(/ /g, '-')

export class Links {
  copied = new Set() // files of docs that are no pages and that pages link to
  dead = new Set()

  constructor(root, pages, versions) {
    this.root = root
    this.versions = versions // where the site's versions begin
    this.pages = pages // what the site has as pages, by their paths below root
  }

  // resolve gives what a link in a file is on the site.
  resolve(source, href, where = source) {
    if (/^([a-z][a-z0-9+.-]*:|\/\/|#|$)/i.test(href)) return href
    const [, to, hash] = href.match(/^([^#]*)(.*)$/)
    const file = path.posix.join(path.posix.dirname(source), decodeURI(to)).replace(/\/$/, '')
    if (to.startsWith('/') || file.startsWith('..') || !fs.existsSync(path.join(this.root, file))) {
      this.dead.add(`${where}: ${href} leads nowhere`)
      return '#'
    }
    const page = [file, path.posix.join(file, 'README.md')].find(page => this.pages.has(page))
    if (page) return `/${route(page)}${hash}`
    if (file.startsWith('docs/') && fs.statSync(path.join(this.root, file)).isFile()) {
      this.copied.add(file)
      return `/${route(file)}${hash}`
    }
    return inRepository(this.root, file) + hash
  }

  // plugin is for markdown-it: it resolves the links of a page when the page is read.
  plugin = (md, { file, where }) => {
    md.core.ruler.push('resolve_links', ({ tokens, env }) => {
      for (const { children, map } of tokens) {
        for (const token of children ?? []) {
          if (token.type === 'link_open') token.attrSet('href', this.resolve(file(env), token.attrGet('href'), where(env, map)))
        }
      }
    })
  }

  // copy puts the files that are no pages beside the pages.
  copy(out) {
    for (const file of this.copied) {
      const to = path.join(out, route(file))
      fs.mkdirSync(path.dirname(to), { recursive: true })
      fs.copyFileSync(path.join(this.root, file), to)
    }
  }

  // problems are those of the links, and of everything that the built pages refer to: each leads to a file, its anchor is there,
  // and nothing is fetched from another host.
  problems(out, base) {
    const problems = [...this.dead]
    const pages = new Map()
    for (const file of fs.readdirSync(out, { recursive: true }).filter(file => file.endsWith('.html'))) {
      const html = fs.readFileSync(path.join(out, file), 'utf8')
      pages.set(file.split(path.sep).join('/'), { html, anchors: new Set(['', ...all(html, /\sid="([^"]*)"/g)]) })
    }
    for (const [file, { html }] of pages) {
      for (const tag of html.match(/<[a-z]+\s[^>]*>/g)) {
        for (const reference of all(tag, /\s(?:href|src)="([^"]*)"/g)) {
          if (/^(data|mailto):/.test(reference)) continue
          const url = new URL(reference.replaceAll('&amp;', '&'), `http://site${base}${file}`)
          const to = decodeURIComponent(url.pathname).slice(base.length).replace(/(^|\/)$/, '$1index.html')
          if (url.host === 'site' && this.versions.includes(url.pathname)) continue
          if (url.host !== 'site') {
            if (!tag.startsWith('<a ')) problems.push(`${file}: ${reference} would be fetched from another host`)
          } else if (!url.pathname.startsWith(base) || !fs.existsSync(path.join(out, to))) {
            problems.push(`${file}: ${reference} leads nowhere`)
          } else if (pages.has(to) && !pages.get(to).anchors.has(decodeURIComponent(url.hash.slice(1)))) {
            problems.push(`${file}: ${reference}: there is no such anchor`)
          }
        }
      }
    }
    return problems
  }
}

const all = (text, expression) => [...text.matchAll(expression)].map(([, match]) => match)
