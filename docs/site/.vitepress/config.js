import fs from 'node:fs'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { defineConfig } from 'vitepress'
import { Diagrams } from './diagrams.js'
import { Links, inRepository, repository, route, slug } from './links.js'
import { map, read } from './map.js'

const here = fileURLToPath(new URL('..', import.meta.url))
// What the pages are of: what is checked out here, or another version that is checked out elsewhere.
const root = process.env.SITE_ROOT || path.resolve(here, '../..')
// Endings of files that pages link to and that are no pages, beside those that VitePress knows. It takes others for pages.
process.env.VITE_EXTRA_EXTENSIONS = 'cast'
// All versions that the site has, [{text, base}], this one among them. Of one alone nothing can be chosen.
const versions = JSON.parse(process.env.SITE_VERSIONS || '[]')
const version = fs.readFileSync(path.join(root, 'VERSION'), 'utf8').trim()
// The path that the site is served at, for example /xpu-device-plugin/.
const base = process.env.BASE || '/'

// complain fails for problems of what is checked out. In a version that nobody can change any more they are warnings.
function complain(what, problems) {
  if (!problems.length) return
  const message = `${what}:\n  ${problems.join('\n  ')}`
  if (!process.env.SITE_ROOT) throw new Error(message)
  console.warn(`warning: ${message}`)
}

const { sections, pages, problems } = read(root)
complain('the map of the documentation is not right', problems)
pages.add('README.md')
const links = new Links(root, pages, versions.map(({ base }) => base))
const diagrams = new Diagrams()
const warnings = new Set()

// file is the path of the page that is read, where a place in it, for messages.
const file = env => path.relative(root, env.realPath ?? env.path).split(path.sep).join('/')
const where = (env, lines) => file(env) + (lines ? `:${lines[0] + 1}` : '')

// HTML that pages may use in their text.
const tags = new Set(['a', 'b', 'br', 'code', 'em', 'i', 'img', 'kbd', 'strong', 'sub', 'sup'])

// entry is what the sidebar has of a file.
const entry = ({ text, file, below }) => {
  const link = links.resolve('README.md', file)
  return {
    text,
    // VitePress puts the base before links to pages only.
    link: link.startsWith('/') && !link.endsWith('.md') ? base + link.slice(1) : link,
    ...(below && { collapsed: true, items: below.map(entry) }),
  }
}

export default defineConfig({
  title: 'xpu-device-plugin',
  description: 'Network functions of SmartNICs, DPUs and IPUs for Kubernetes pods',
  lang: 'en',
  base,
  head: [
    // A page asks no host for anything but the one that it comes from.
    ['meta', { 'http-equiv': 'Content-Security-Policy', content: "default-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:" }],
    ['link', { rel: 'icon', href: 'data:,' }],
  ],

  // Pages are the project's README.md and those of docs.
  srcDir: root,
  srcExclude: fs
    .readdirSync(root, { withFileTypes: true })
    .filter(({ name }) => name !== 'docs' && !pages.has(name))
    .map(entry => (entry.isDirectory() ? `${entry.name}/**` : entry.name))
    .concat('docs/site/**', 'docs/gen/**'),
  rewrites: route,
  // What buildEnd finds in another version is a warning, and the same must not end the build here.
  ignoreDeadLinks: Boolean(process.env.SITE_ROOT),
  outDir: process.env.SITE_OUT || path.join(root, 'bin/site'),
  cacheDir: path.join(here, 'node_modules/.cache'),

  markdown: {
    // Pages are read as GitHub reads them: {..} is no attribute, {{..}} no code, :ab: no picture, and anchors are GitHub's.
    attrs: { disable: true },
    anchor: { slugify: slug },
    config(md) {
      md.core.ruler.disable('emoji')
      const literal = text => md.utils.escapeHtml(text).replaceAll('{{', '&#123;&#123;')
      md.renderer.rules.text = (tokens, i) => literal(tokens[i].content)
      md.renderer.rules.code_inline = (tokens, i) => `<code>${literal(tokens[i].content)}</code>`
      md.use(links.plugin, { file, where })
      md.use(diagrams.plugin, { where })
      const { fence } = md.renderer.rules
      md.renderer.rules.code_block = (tokens, i, ...rest) => {
        tokens[i].info = 'text'
        return fence(tokens, i, ...rest)
      }
      // What looks like a tag and is none lacks its backquotes. GitHub shows nothing of it.
      md.renderer.rules.html_inline = (tokens, i, options, env) => {
        const { content } = tokens[i]
        const tag = content.match(/^<\/?([a-z][a-z0-9-]*)/i)?.[1].toLowerCase()
        if (!tag || tags.has(tag)) return content
        warnings.add(`${file(env)}: ${content} is no HTML and shown as text: put it in backquotes`)
        return md.utils.escapeHtml(content)
      }
    },
  },

  async buildEnd({ outDir, logger }) {
    warnings.forEach(warning => logger.warn(warning))
    links.copy(outDir)
    const problems = [...links.problems(outDir, base), ...(await diagrams.problems())]
    complain(`the pages have ${problems.length} problems`, problems)
  },

  themeConfig: {
    nav: [
      versions.length < 2
        ? { text: version, link: inRepository(root, 'CHANGELOG.md') }
        : {
            component: 'Versions',
            props: {
              current: versions.find(version => version.base === base)?.text ?? version,
              versions,
              changes: inRepository(root, 'CHANGELOG.md'),
            },
          },
      { text: 'GitHub', link: repository },
    ],
    sidebar: [
      {
        items: [
          { text: 'Overview', link: '/' },
          { text: 'Map and words', link: `/${route(map)}` },
        ],
      },
      ...sections.map(({ text, entries }) => ({ text, collapsed: false, items: entries.map(entry) })),
    ],
    outline: [2, 3],
    search: { provider: 'local' },
    ...(!process.env.SITE_ROOT && { editLink: { pattern: `${repository}/edit/main/:path`, text: 'Edit this page' } }),
  },

  vite: {
    plugins: [
      {
        // Pages are below no directory in which Vue is installed. When they are built it is this directory's.
        name: 'vue-of-the-site',
        enforce: 'pre',
        resolveId: (id, from, { ssr }) => (ssr && /^vue(\/|$)/.test(id) ? { id, external: true } : null),
      },
    ],
    // Mermaid is large, and loaded by pages with diagrams only.
    build: { chunkSizeWarningLimit: 2000 },
    server: { watch: { ignored: ['**/bin/**'] } },
  },
})
